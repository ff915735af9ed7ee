#!/usr/bin/env bash
# Describes the GPU nodes of a Kubernetes cluster from their labels, and from reports of the pods of a job: docs/discovery.md.
# POD_SELECTOR names pods on those nodes that have nest-megatron; without it the rates of adapters are assumed, and said to be.
set -eu

kubectl get nodes -o json > nodes.json
reads=(--read nodes.json)
if [ -n "${POD_SELECTOR:-}" ]; then
  kubectl get pods -l "$POD_SELECTOR" -o 'jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName}{"\n"}{end}' > pods.txt
  : > reports.jsonl
  while read -r pod node; do  # a pod does not know its node's name
    kubectl exec "$pod" -- nest-megatron cluster report --name "$node" < /dev/null >> reports.jsonl
  done < pods.txt
  reads+=(--read reports.jsonl)
fi
nest-megatron cluster discover "${reads[@]}" --out cluster.yaml --hosts-out hosts.txt
