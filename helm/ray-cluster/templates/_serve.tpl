{{/*
Serve's config file, from the configuration as `ray-cluster config --serve-deploy` writes it: each
application is started with the keys that files/slices.json lists, and no settings.
*/}}
{{- define "ray-cluster.part" -}}
{{- $given := dict -}}
{{- range .keys -}}
{{- if hasKey $.section . -}}
{{- $_ := set $given . (get $.section .) -}}
{{- end -}}
{{- end -}}
{{- toJson $given -}}
{{- end -}}

{{- define "ray-cluster.parts" -}}
{{- $parts := dict -}}
{{- range $section, $keys := .reads -}}
{{- $given := include "ray-cluster.part" (dict "section" (get $.config $section | default dict) "keys" $keys) | fromJson -}}
{{- if $given -}}
{{- $_ := set $parts $section $given -}}
{{- end -}}
{{- end -}}
{{- toJson $parts -}}
{{- end -}}

{{- define "ray-cluster.serve" -}}
{{- $config := include "ray-cluster.config" . | fromJson -}}
{{- $slices := .Files.Get "files/slices.json" | fromJson -}}
{{- $names := $slices.names -}}
{{- $defaults := $slices.defaults -}}
{{- $control := $config.control | default dict -}}
{{- $byPolicy := and $control.enabled (eq ($control.scaling | default $defaults.scaling) "policy") -}}
{{- $applications := list -}}

{{- $front := include "ray-cluster.parts" (dict "config" $config "reads" $slices.front) | fromJson -}}
{{- $front = merge $front (dict "settings" "/etc/ray-cluster/settings/config.yaml" "overridden" list) -}}
{{- $gateways := dict "name" $names.gateway "num_replicas" ($config.http.num_gateways | default $defaults.gateways) -}}
{{- $applications = append $applications (dict "name" "front" "route_prefix" "/" "import_path" $names.builder "args" (dict "front" $front) "deployments" (list $gateways)) -}}

{{- $stores := $defaults.stores -}}
{{- if hasKey ($config.loras | default dict) "num_stores" -}}
{{- $stores = $config.loras.num_stores -}}
{{- end -}}
{{- if $stores -}}
{{- $args := include "ray-cluster.parts" (dict "config" $config "reads" $slices.loras) | fromJson -}}
{{- $args = merge $args (dict "kind" "lora" "name" $names.lorasApplication) -}}
{{- $applications = append $applications (dict "name" $names.lorasApplication "route_prefix" nil "import_path" $names.builder "external_scaler_enabled" true "args" (dict "worker" $args) "deployments" (list (dict "name" $names.loras "num_replicas" $stores))) -}}
{{- end -}}

{{- if $control.enabled -}}
{{- $args := include "ray-cluster.parts" (dict "config" $config "reads" $slices.controller) | fromJson -}}
{{- $applications = append $applications (dict "name" "controller" "route_prefix" nil "import_path" $names.builder "args" (dict "controller" $args) "deployments" (list (dict "name" $names.controller "num_replicas" 1))) -}}
{{- end -}}

{{- range $row := $slices.workers -}}
{{- range $worker := (get $config $row.section | default list) -}}
{{- if ne (get $worker "mode" | default "service") "local" -}}
{{- $args := include "ray-cluster.parts" (dict "config" $config "reads" $row.reads) | fromJson -}}
{{- $own := include "ray-cluster.part" (dict "section" $worker "keys" $row.own) | fromJson -}}
{{- $_ := set $args $row.section (list $own) -}}
{{- if eq $row.kind "denoise" -}}
{{- $run := list -}}
{{- range $slices.workers -}}
{{- if eq .section "controlnets" -}}
{{- $keys := .own -}}
{{- range $one := $config.controlnets -}}
{{- if and (eq ($one.mode | default "service") "local") (has ($worker.served_as | default $worker.name) $one.bases) -}}
{{- $run = append $run (include "ray-cluster.part" (dict "section" $one "keys" $keys) | fromJson) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $args "controlnets" $run -}}
{{- end -}}
{{- $args = merge $args (dict "kind" $row.kind "name" $worker.name) -}}
{{- $replicas := $worker.replicas | default 1 -}}
{{- $name := $row.deployment -}}
{{- if gt (int ($worker.ranks | default 1)) 1 -}}
{{- $name = $names.group -}}
{{- end -}}
{{- $deployment := dict "name" $name "num_replicas" $replicas -}}
{{- if $byPolicy -}}
{{- $options := deepCopy $slices.policy -}}
{{- $_ := set $options.autoscaling_config "initial_replicas" $replicas -}}
{{- $deployment = merge (dict "name" $name) $options -}}
{{- end -}}
{{- if $worker.surge -}}
{{- $_ := set $deployment "max_surge_percent" $slices.surgePercent -}}
{{- end -}}
{{- $applications = append $applications (dict "name" $worker.name "route_prefix" nil "import_path" $names.builder "external_scaler_enabled" (not $byPolicy) "args" (dict "worker" $args) "deployments" (list $deployment)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $http := dict "host" $config.http.host "port" $config.http.port "keep_alive_timeout_s" ($config.http.keep_alive_s | default $defaults.keepAlive) -}}
{{- dict "proxy_location" "EveryNode" "http_options" $http "applications" $applications | toYaml -}}
{{- end -}}
