#!/usr/bin/env bash
# A job that names a plan (NEST_PLAN=FILE) starts only where a trusted reviewer signed that plan.
# Run it in a TaskProlog, or at the head of a job's script: docs/policy.md has the exit codes.
set -u

[ -n "${NEST_PLAN:-}" ] || exit 0
nest-megatron verify "$NEST_PLAN" --key "${NEST_TRUSTED_KEYS:-/etc/nest-megatron/keys}" && exit 0
code=$?
# A TaskProlog speaks to the job through lines that begin with "print".
echo "print nest: $NEST_PLAN is not launched (nest-megatron verify: exit code $code)"
exit "$code"
