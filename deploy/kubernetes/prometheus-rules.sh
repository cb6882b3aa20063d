#!/bin/sh
# Prints the alert and recording rules of deploy/prometheus as PrometheusRule objects, one for each file:
#
#   deploy/kubernetes/prometheus-rules.sh [NAMESPACE] | kubectl apply -f -
set -eu
namespace="${1:-truedraft}"
cd "$(dirname "$0")/../prometheus"
for file in *.rules.yml; do
    name="$(basename "$file" .rules.yml)"
    cat <<END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: $name
  namespace: $namespace
  labels: {app.kubernetes.io/name: truedraft}
spec:
END
    sed 's/^/  /' "$file"
done
