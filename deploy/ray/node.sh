#!/usr/bin/env bash
# Start Ray on this node: node.sh head | node.sh worker
#
# The environment (see lab.env) says where the head is and what this node's GPUs are:
#   NODE_HEAD      address of the head node                       (needed by workers)
#   NODE_KIND      kind of the GPUs, as lazytrain plan --gpu names it; by default asked of nvidia-smi
#   NODE_GPUS      how many GPUs; by default those of nvidia-smi
#   NODE_PORT      port of the head                               (6379)
#   NODE_NAME      name in lazytrain nodes; by default the host name
#   NODE_BLOCK     "--block" keeps ray in the foreground, for systemd, Slurm and containers
#   LAZYTRAIN_RAY_TOKEN   file with the token that all nodes share; by default ray_token in LAZYTRAIN_HOME
set -euo pipefail

role="${1:?head or worker}"
port="${NODE_PORT:-6379}"
object_store=83886080

names="$(command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name --format=csv,noheader || true)"
if [[ "$(sort -u <<<"$names" | sed '/^$/d' | wc -l)" -gt 1 && -z "${NODE_KIND:-}" ]]; then
  echo "this node has unlike GPUs; start one Ray node per kind, with CUDA_VISIBLE_DEVICES, NODE_KIND and NODE_GPUS" >&2
  exit 2
fi
kind="${NODE_KIND:-$(head -n 1 <<<"$names" | sed 's/NVIDIA //; s/GeForce //; s/[^A-Za-z0-9._-]\{1,\}/-/g; s/^-//; s/-$//')}"
gpus="${NODE_GPUS:-$(sed '/^$/d' <<<"$names" | wc -l)}"
labels="lt/node-name=${NODE_NAME:-$(hostname -s)}"
[[ "$gpus" -gt 0 ]] && labels="$labels,lt/gpu-kind=$kind,lt/device=cuda"

export RAY_memory_usage_threshold="${LAZYTRAIN_RAY_MEMORY_THRESHOLD:-0.97}"
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token
if [[ -z "${RAY_AUTH_TOKEN:-}" ]]; then
  export RAY_AUTH_TOKEN_PATH="${LAZYTRAIN_RAY_TOKEN:-${LAZYTRAIN_HOME:-$HOME/.lazytrain}/ray_token}"
  if [[ ! -s "$RAY_AUTH_TOKEN_PATH" ]]; then
    echo "no token of Ray in $RAY_AUTH_TOKEN_PATH; make one on the head and copy it to every node:" >&2
    echo "  (umask 077; openssl rand -hex 32 >$RAY_AUTH_TOKEN_PATH)" >&2
    exit 2
  fi
fi

common=(--num-gpus "$gpus" --labels "$labels" --object-store-memory "$object_store")
[[ -n "${NODE_BLOCK:-}" ]] && common+=("$NODE_BLOCK")
case "$role" in
  head) exec ray start --head --port "$port" --include-dashboard true --dashboard-host 127.0.0.1 "${common[@]}" ;;
  worker) exec ray start --address "${NODE_HEAD:?address of the head node}:$port" "${common[@]}" ;;
  *) echo "node.sh head | node.sh worker, not $role" >&2; exit 2 ;;
esac
