{{- define "ray-cluster.name" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}

{{/* Labels that never change: of pods and selectors. */}}
{{- define "ray-cluster.selector" -}}
app.kubernetes.io/name: ray-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ray-cluster.labels" -}}
{{ include "ray-cluster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "ray-cluster.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "ray-cluster.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- include "ray-cluster.name" . -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The configuration with what the chart itself decides: where mounted files are. */}}
{{- define "ray-cluster.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config.dispatch "service" (printf "%s/%s" .Release.Namespace (include "ray-cluster.name" .)) -}}
{{- if .Values.apiKeys.secret -}}
{{- $_ := set $config.http "api_keys_file" (printf "/etc/ray-cluster/keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if .Values.jobStore.secret -}}
{{- $_ := unset $config.storage "jobs" -}}
{{- $_ := set $config.storage "jobs_file" (printf "/etc/ray-cluster/job-store/%s" .Values.jobStore.key) -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* Models of the hub that the configuration names. */}}
{{- define "ray-cluster.hubModels" -}}
{{- $found := list -}}
{{- range $section := list "pools" "discriminators" "controlnets" -}}
{{- range (get $.Values.config $section | default list) -}}
{{- if regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$" .model -}}
{{- $found = append $found .model -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | sortAlpha | toJson -}}
{{- end -}}

{{- define "ray-cluster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
