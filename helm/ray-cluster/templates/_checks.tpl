{{/* Refuses values that a cluster would take and that would not work, and says what to change. */}}
{{- define "ray-cluster.check" -}}
{{- $values := .Values -}}
{{- $config := $values.config -}}
{{- $name := include "ray-cluster.name" . -}}

{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %q has %d characters; KubeRay allows 47: set fullnameOverride, or choose a shorter release name" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q must begin with a letter and hold small letters, digits and '-' only: set fullnameOverride" $name) -}}
{{- end -}}

{{- if $config.ray -}}
{{- fail "config.ray starts Ray on one machine; here KubeRay does: leave it out, and use head, front, groups and rayToken" -}}
{{- end -}}
{{- if has ($config.http.host | default "127.0.0.1") (list "127.0.0.1" "localhost" "::1") -}}
{{- fail "config.http.host is of one machine: no pod could be called; set it to 0.0.0.0" -}}
{{- end -}}
{{- if not $config.dispatch.front_resource -}}
{{- fail "config.dispatch.front_resource is empty, so the dispatcher could run on a pod that scaling takes away: set it to front" -}}
{{- end -}}
{{- range $config.http.api_keys -}}
{{- if kindIs "string" . -}}
{{- fail "config.http.api_keys holds a plain key, which everybody who reads the ConfigMap would see: put keys into a Secret and name it in apiKeys.secret, or give digests ('ray-cluster keys new NAME' prints an entry)" -}}
{{- end -}}
{{- end -}}
{{- if and $config.http.api_keys_file $values.apiKeys.secret -}}
{{- fail "config.http.api_keys_file and apiKeys.secret both say where keys are: leave the first out" -}}
{{- end -}}

{{- $jobs := $config.storage.jobs | default "" -}}
{{- if and (not $values.jobStore.secret) (not $config.storage.jobs_file) -}}
{{- if regexMatch "^postgresql.*://[^/@]*:[^/@]*@" $jobs -}}
{{- fail "config.storage.jobs holds a password, which everybody who reads the RayService would see: put the URL into a Secret and name it in jobStore.secret" -}}
{{- end -}}
{{- if not (regexMatch "^(sqlite:////|postgresql)" $jobs) -}}
{{- fail (printf "config.storage.jobs is %q: give sqlite:////var/lib/ray-cluster/jobs.db, or a postgresql:// URL by jobStore.secret" $jobs) -}}
{{- end -}}
{{- if and (hasPrefix "sqlite" $jobs) (has "ReadWriteMany" $values.volume.accessModes) -}}
{{- fail "the job store is SQLite on a volume of several machines, where its locks do not hold: use PostgreSQL by jobStore.secret, or volume.accessModes: [ReadWriteOnce] on one machine" -}}
{{- end -}}
{{- end -}}
{{- $isLocal := false -}}
{{- range $key := list "results" "states" "inputs" -}}
{{- $place := get $config.storage $key | default "" -}}
{{- if not (regexMatch "^(/|[a-z0-9]+://)" $place) -}}
{{- fail (printf "config.storage.%s is %q: give a path on the volume, such as /var/lib/ray-cluster/%s, or an object store's URL, such as s3://bucket/%s" $key $place $key $key) -}}
{{- end -}}
{{- if hasPrefix "/" $place -}}
{{- $isLocal = true -}}
{{- end -}}
{{- if and (hasPrefix "/var/lib/ray-cluster/" $place) (not $values.volume.enabled) -}}
{{- fail (printf "config.storage.%s is on the volume at /var/lib/ray-cluster, but volume.enabled is false: set it to true, or give an object store's URL" $key) -}}
{{- end -}}
{{- end -}}
{{- if and $isLocal (not $config.storage.is_shared) -}}
{{- fail "config.storage names folders and is_shared is false: the service refuses folders that not all pods share; set config.storage.is_shared: true for those on the volume, or give an object store's URLs" -}}
{{- end -}}
{{- if not (hasPrefix "/" ($config.loras.folder | default "")) -}}
{{- fail "config.loras.folder must be an absolute path on a pod's own disk, such as /scratch/loras" -}}
{{- end -}}

{{- $gpus := 0.0 -}}
{{- range $group, $one := $values.groups -}}
{{- if has $group (list "front" "head" "headgroup" "memory") -}}
{{- fail (printf "groups.%s has a name of the chart's or Ray's own: choose another" $group) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $group) -}}
{{- fail (printf "groups.%s: a group's name begins with a letter and holds small letters, digits and '-' only" $group) -}}
{{- end -}}
{{- $gpus = maxf $gpus ($one.gpus | default 0) -}}
{{- if $values.autoscaler.enabled -}}
{{- $most := $one.maxReplicas | default $one.replicas | default 0 | int -}}
{{- if or (lt $most ($one.minReplicas | default 0 | int)) (lt $most ($one.replicas | default 0 | int)) -}}
{{- fail (printf "groups.%s.maxReplicas is %d, below replicas or minReplicas: raise it" $group $most) -}}
{{- end -}}
{{- else if or $one.minReplicas $one.maxReplicas -}}
{{- fail (printf "groups.%s has minReplicas or maxReplicas, which only the autoscaler reads: set autoscaler.enabled: true, or give replicas alone" $group) -}}
{{- end -}}
{{- end -}}
{{- $stores := $config.loras.node_resource -}}
{{- range $group, $one := $values.groups -}}
{{- $made := ($one.rayStartParams | default dict).resources -}}
{{- if and $stores $made (not (contains (quote $stores) ($made | replace "\\" ""))) -}}
{{- fail (printf "groups.%s.rayStartParams.resources lacks %s, without which no store of LoRAs runs there: add it, or set config.loras.node_resource: null" $group $stores) -}}
{{- end -}}
{{- end -}}
{{- range $section := list "pools" "discriminators" "controlnets" "upscalers" -}}
{{- range (get $config $section | default list) -}}
{{- $resource := .node_resource | default "" -}}
{{- $made := "" -}}
{{- range $group, $one := $values.groups -}}
{{- $made = printf "%s %s" $made (($one.rayStartParams | default dict).resources | default (quote $group)) -}}
{{- end -}}
{{- if and $resource (not (contains (quote $resource) ($made | replace "\\" ""))) -}}
{{- fail (printf "%s of %s has node_resource %s, but no group's pods have that: name a group, whose pods have its name as a resource" .name $section $resource) -}}
{{- end -}}
{{- if gt (.num_gpus | default 0.0 | float64) $gpus -}}
{{- fail (printf "%s of %s needs num_gpus: %v, but no group has pods with so many: set groups.NAME.gpus" .name $section .num_gpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $strategy := $values.upgrade.strategy -}}
{{- if eq $strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not (and $values.autoscaler.enabled $values.upgrade.gatewayClassName) -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs autoscaler.enabled: true and upgrade.gatewayClassName" -}}
{{- end -}}
{{- if or $values.ingress.enabled $values.httpRoute.enabled -}}
{{- fail "with upgrade.strategy NewClusterWithIncrementalUpgrade clients enter by the Gateway that KubeRay makes: disable ingress and httpRoute, which know nothing of its shares" -}}
{{- end -}}
{{- end -}}
{{- if le (int $values.upgrade.deletionDelaySeconds) (int ($values.front.terminationGracePeriodSeconds | default 60)) -}}
{{- fail (printf "upgrade.deletionDelaySeconds %v is not above front.terminationGracePeriodSeconds %v: calls that the earlier cluster has begun would be cut off; raise the first" $values.upgrade.deletionDelaySeconds $values.front.terminationGracePeriodSeconds) -}}
{{- end -}}

{{- if $values.gcsFaultTolerance.externalStorageNamespace -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace would be shared by two Ray clusters during an upgrade, and each would read the other's state: leave it out, KubeRay gives every cluster its own" -}}
{{- end -}}
{{- if and $values.gcsFaultTolerance.redis.address $values.gcsFaultTolerance.rocksdb.enabled -}}
{{- fail "gcsFaultTolerance has both redis.address and rocksdb.enabled: choose one" -}}
{{- end -}}

{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that it belongs to" -}}
{{- end -}}
{{- end -}}
