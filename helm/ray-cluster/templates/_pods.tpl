{{/* The template of a pod: `root`, `group` (its values), `role` (head, front or worker), `name`. */}}
{{- define "ray-cluster.pod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $values := $root.Values -}}
{{- $slices := $root.Files.Get "files/slices.json" | fromJson -}}
metadata:
  labels:
    {{- include "ray-cluster.selector" $root | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "ray-cluster.serviceAccount" $root }}
  {{- if not $values.autoscaler.enabled }}
  automountServiceAccountToken: false
  {{- else if ne .role "head" }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $group.terminationGracePeriodSeconds | default 60 }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with get $group $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .role }}
      image: {{ $group.image | default (include "ray-cluster.image" $root) | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "ray-cluster.containerSecurity" $root | nindent 8 }}
      env:
        - {name: HOME, value: /scratch}
        - {name: HF_HOME, value: {{ ternary "/models" "/scratch/models" $values.models.enabled }}}
        {{- range $name, $value := $slices.environment }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if eq .role "front" }}
      readinessProbe:
        httpGet: {path: /readyz, port: {{ $values.config.http.port }}}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 1
      ports:
        - {name: api, containerPort: {{ $values.config.http.port }}}
      {{- else if eq .role "head" }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
      {{- else }}
      # by this name KubeRay finds the port at which it asks a pod's proxy for its health
      ports:
        - {name: serve, containerPort: {{ $values.config.http.port }}}
      {{- end }}
      {{- $resources := deepCopy $group.resources }}
      {{- with $group.gpus }}
      {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .) ($resources.limits | default dict)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: scratch, mountPath: /scratch}
        - {name: scratch, mountPath: /tmp, subPath: tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.volume.enabled }}
        - {name: data, mountPath: /var/lib/ray-cluster}
        {{- end }}
        {{- if $values.models.enabled }}
        - {name: models, mountPath: /models}
        {{- end }}
        {{- if eq .role "front" }}
        - {name: settings, mountPath: /etc/ray-cluster/settings, readOnly: true}
        {{- if $values.apiKeys.secret }}
        - {name: keys, mountPath: /etc/ray-cluster/keys, readOnly: true}
        {{- end }}
        {{- if $values.jobStore.secret }}
        - {name: job-store, mountPath: /etc/ray-cluster/job-store, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    - name: scratch
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize | default "1Gi" }}}
    {{- if $values.volume.enabled }}
    - name: data
      persistentVolumeClaim:
        claimName: {{ $values.volume.existingClaim | default (include "ray-cluster.name" $root) }}
    {{- end }}
    {{- if $values.models.enabled }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ $values.models.existingClaim | default (printf "%s-models" (include "ray-cluster.name" $root)) }}
    {{- end }}
    {{- if eq .role "front" }}
    - name: settings
      configMap: {name: {{ include "ray-cluster.name" $root }}-settings}
    {{- if $values.apiKeys.secret }}
    - name: keys
      secret: {secretName: {{ $values.apiKeys.secret | quote }}}
    {{- end }}
    {{- if $values.jobStore.secret }}
    - name: job-store
      secret: {secretName: {{ $values.jobStore.secret | quote }}}
    {{- end }}
    {{- end }}
{{- end -}}
