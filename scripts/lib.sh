# Shared by quickstart.sh and test.sh: make .venv and install the project into it once. Sourced, not run.
#
# MILES_ASYNC_TORCH   a pip requirement for torch, e.g. 'torch==2.12.0'; set it to decide yourself which build is taken
# MILES_ASYNC_PYTHON  the interpreter to use instead of the first fitting one on PATH

CPU_TORCH="2.13.0"
GPU_TORCH="torch>=2.11,<2.12"
CPU_INDEX="https://download.pytorch.org/whl/cpu"

# What nobody imports is not compiled: of 24,000 files about 4,000 are needed. `prepare` imports most of those once.
export PIP_COMPILE=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Prints a Python of 3.11 to 3.13 that can make a venv with pip; dies with the package to install otherwise.
find_python() {
    local name path found="" version
    for name in ${MILES_ASYNC_PYTHON:-python3 python3.12 python3.11 python3.13}; do
        path=$(command -v "$name") || continue
        version=$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
            2>/dev/null) || continue
        if "$path" -c 'import venv, ensurepip' 2>/dev/null; then
            printf '%s\n' "$path"
            return
        fi
        found="$version"
    done
    if [ -n "$found" ]; then
        die "Python $found has no venv module; install it with: apt install python$found-venv"
    fi
    die "no Python 3.11, 3.12 or 3.13 on PATH (${MILES_ASYNC_PYTHON:-python3, python3.11 to python3.13});" \
        "install one with: apt install python3 python3-venv"
}

has_nvidia_gpu() {
    [ "$(uname -s)" = Linux ] && { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }
}

# Whether a page answers within a few seconds; asked with Python, because curl may not be there.
reachable() {
    .venv/bin/python - "$1" <<'EOF' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=8).close()
EOF
}

# Prints shell lines by which uv takes what pip is configured to take: indexes, certificates, folders of wheels, constraints. Exits 1
# where pip's configuration says more than that.
uv_settings() {
    .venv/bin/python -m pip config list | .venv/bin/python -c '
import ast, re, shlex, sys
told = {"index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "), "find-links": ("UV_FIND_LINKS", ","),
        "constraint": ("UV_CONSTRAINT", " "), "trusted-host": ("UV_INSECURE_HOST", " "), "cert": ("SSL_CERT_FILE", " ")}
idle = re.compile("config-file|(default-)?timeout|retries|disable-pip-version-check|no-input|root-user-action|quiet|progress-bar"
                  "|prefer-binary|(no-)?(compile|color|cache-dir)")
found = {}
for line in sys.stdin:  # what comes first holds: the environment, then sections by name
    name, _, value = line.strip().partition("=")
    option = name.rpartition(".")[2]
    if option in told:
        key, mark = told[option]
        found.setdefault(key, mark.join(ast.literal_eval(value).split()))
    elif not idle.fullmatch(option):
        sys.exit(1)
for key, value in found.items():
    print(f"export {key}={shlex.quote(value)}")'
}

# uv needs a fifth of the time that pip needs, and reads none of its configuration.
by_uv=""
take_uv() {
    local told
    told=$(uv_settings) && .venv/bin/python -m pip install --quiet uv 2>/dev/null || return 0
    eval "$told"
    export UV_INDEX_STRATEGY=unsafe-best-match UV_NO_CONFIG=1 # the best version of all indexes, as pip chooses
    by_uv=1
}

# Installs requirements into .venv, by pip where uv cannot; the status says whether they are there.
install() {
    if [ -n "$by_uv" ]; then
        .venv/bin/uv pip install --python .venv/bin/python "$@" && return
        say "uv could not install $*; asking pip"
    fi
    .venv/bin/python -m pip install "$@"
}

# Packages that only a CUDA build of torch asks for, from a resolution that downloads metadata, not wheels.
cuda_packages_of() {
    .venv/bin/python -m pip install --quiet --dry-run --report - "$1" 2>/dev/null | .venv/bin/python -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
print(" ".join(name for name in names if name.startswith(("nvidia-", "cuda-"))))'
}

# torch first and by itself: the default build of the package index brings gigabytes of CUDA, useless without a GPU.
install_torch() {
    local extra="" cuda
    if [ -n "${MILES_ASYNC_TORCH:-}" ]; then
        install "$MILES_ASYNC_TORCH" || die "could not install MILES_ASYNC_TORCH='$MILES_ASYNC_TORCH'; see above"
        return
    fi
    if .venv/bin/python -c 'import torch' 2>/dev/null; then return; fi
    if has_nvidia_gpu; then
        install "$GPU_TORCH" || die "could not install $GPU_TORCH for this GPU machine; see above"
        return
    fi
    if [ "$(uname -s)" != Linux ]; then
        install "torch==$CPU_TORCH" || die "could not install torch==$CPU_TORCH; see above"
        return
    fi
    # The local version +cpu exists only for CPU builds, so no CUDA build can slip in from another index.
    if reachable "$CPU_INDEX/torch/"; then extra="--extra-index-url $CPU_INDEX"; fi
    # shellcheck disable=SC2086  # $extra is two words or none
    if install $extra "torch==$CPU_TORCH+cpu"; then return; fi
    say "no torch $CPU_TORCH+cpu there; asking the default index whether its torch comes without CUDA"
    cuda=$(cuda_packages_of "torch==$CPU_TORCH") || die "no torch $CPU_TORCH for this machine: $CPU_INDEX and the" \
        "package index have none or are unreachable; set MILES_ASYNC_TORCH to a requirement that your index can serve"
    [ -z "$cuda" ] || die "no CPU build of torch found: $CPU_INDEX is unreachable and the index's torch would bring" \
        "gigabytes of CUDA ($(printf '%s' "$cuda" | wc -w) packages); allow that host, put a CPU wheel where pip finds" \
        "it (PIP_FIND_LINKS), or accept CUDA with MILES_ASYNC_TORCH=torch==$CPU_TORCH"
    install "torch==$CPU_TORCH" || die "could not install torch==$CPU_TORCH; see above"
}

# prepare EXTRAS: .venv with the project and its extras ('' or '[test]'), installed only when pyproject.toml changed.
prepare() {
    local extras="$1" stamp python wanted
    stamp=".venv/.installed$extras"
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        python=$(find_python) || exit 1
        say "making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv || die "$python could not make .venv here; check that the directory is writable"
    fi
    wanted=$(cat pyproject.toml scripts/lib.sh | .venv/bin/python -c '
import hashlib, sys
print(sys.version.split()[0], hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    say "installing (once; some minutes)"
    take_uv
    install_torch
    # Held fast: a requirement that the installed torch does not meet must fail here, not replace it by a CUDA build.
    .venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >.venv/constraints.txt || die "torch is not in .venv after its installation; remove .venv and run this again"
    # Compiles what torch imports while the rest is installed.
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -c 'import torch' &
    install -c .venv/constraints.txt -e ".$extras" || die "could not install this project; see above"
    wait $! || true
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import torch, actors.trainer.torch_backend.core, miles_async.launcher.run' ||
        die "torch is installed but does not import; remove .venv and run this again"
    printf '%s\n' "$wanted" >"$stamp"
}
