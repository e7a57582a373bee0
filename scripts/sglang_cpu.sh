#!/usr/bin/env bash
# A real SGLang server on a CPU, of tiny models: what SGLang does, without a GPU. Slow, and only for trying and for tests/engine.
#
#   scripts/sglang_cpu.sh DIR                     makes DIR: a Python environment beside .venv, whose packages it uses (1.5 minutes)
#   DIR/bin/sglang-cpu --model-path M --port P    starts a server; further flags are SGLang's
#   DIR/bin/miles-cpu train configs/quickstart.toml --engine sglang --rollout-num-gpus 1 ...   runs with such engines
#
# In DIR, stand-ins take the place of sgl_kernel and torchvision, SGLang pins no memory and waits for no GPU; the rest of it is as released.
# --enable-deterministic-inference samples by seed as on a GPU (its Triton kernel interpreted) with products that depend on the batch.
set -euo pipefail
dir=$(mkdir -p "${1:?usage: scripts/sglang_cpu.sh DIR}" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
[ -x .venv/bin/python ] || prepare "[test]"
.venv/bin/python -m venv "$dir"
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/beside.pth"
"$dir/bin/pip" install --quiet --no-deps --ignore-installed \
    airportsdata==20260905 annotated-doc==0.0.7 anthropic==2.12.0 apache-tvm-ffi==0.1.9 blobfile==3.3.0 certifi==2026.10.18 \
    cffi==2.1.1 charset-normalizer==3.5.2 cloudpickle==3.1.2 compressed-tensors==0.20.0 datasets==5.2.0 dill==0.4.1 \
    diskcache==5.6.3 distro==1.9.0 docstring_parser==0.18.0 easydict==1.14 einops==0.8.2 fastapi==0.121.3 gguf==0.19.0 \
    httpcore==1.0.9 httptools==0.9.0 httpx==0.28.1 huggingface_hub==1.33.0 importlib_metadata==8.7.0 interegular==0.3.3 \
    ipython==9.18.1 jiter==0.19.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.3.1 loguru==0.7.3 \
    multiprocess==0.70.19 nest-asyncio==1.6.0 openai==2.6.1 openai-harmony==0.0.4 opentelemetry-api==1.38.0 orjson==3.13.0 \
    outlines==0.1.11 outlines_core==0.1.26 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pycparser==3.12 \
    pycryptodomex==3.24.2 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 requests==2.34.2 rpds-py==2026.9.1 \
    sentencepiece==0.2.3 setproctitle==1.3.8 sglang==0.5.12.post1 sniffio==1.3.1 soundfile==0.14.0 starlette==0.49.3 \
    tabulate==0.10.0 tokenizers==0.22.2 torchao==0.17.0 traitlets==5.16.1 transformers==5.6.0 triton==3.9.0 urllib3==2.8.0 \
    uvicorn==0.38.0 watchfiles==1.3.0 websockets==17.4 xxhash==4.1.0
cat >"$site/gpu_only.py" <<'PY'
"""Modules that need a GPU, as far as imports go: any name of theirs exists, and fails when it is called."""
import importlib.abc
import importlib.machinery
import sys
import types

NAMES = ("sgl_kernel", "torchvision")


class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Anything(Meta):
    pass


class Missing(metaclass=Meta):
    def __init__(self, *args, **kwargs):
        raise RuntimeError(f"{type(self).__name__} needs a GPU")


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Missing,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in NAMES else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
PY
echo "import gpu_only" >"$site/gpu_only.pth"
grep -rl "pin_memory=True" --include='*.py' "$site/sglang/srt" | xargs sed -i 's/pin_memory=True/pin_memory=False/'
sed -i '/torch.cuda.synchronize()/d' "$site/sglang/srt/utils/weight_checker.py"
sed -i 's/^DETERMINISTIC_ATTENTION_BACKEND_CHOICES = \[/&"torch_native", /' "$site/sglang/srt/server_args.py"
sed -i 's/^        if server_args.enable_deterministic_inference:$/        if server_args.enable_deterministic_inference and self.device != "cpu":/' \
    "$site/sglang/srt/model_executor/model_runner.py"
for name in sglang-cpu:sglang.launch_server miles-cpu:miles_async; do
    cat >"$dir/bin/${name%%:*}" <<SH
#!/usr/bin/env bash
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD\${PYTHONPATH:+:\$PYTHONPATH}"
case " \$* " in *enable-deterministic-inference*) export TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 ;; esac
exec "$dir/bin/python" -m ${name#*:} "\$@"
SH
    chmod +x "$dir/bin/${name%%:*}"
done
sed -i 's/launch_server "\$@"/launch_server --device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --skip-tokenizer-init --disable-cuda-graph --dtype float32 --mem-fraction-static 0.3 --max-total-tokens 20000 "$@"/' "$dir/bin/sglang-cpu"
echo "ready: $dir/bin/sglang-cpu, $dir/bin/miles-cpu"
