{{- define "kvd.labels" -}}
app.kubernetes.io/name: kvd
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: vllm
{{- end }}
