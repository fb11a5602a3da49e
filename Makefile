# Each target installs what it needs in .venv, with the versions of constraints.txt. `make help` lists the targets.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null)
VENV := .venv
BIN := $(VENV)/bin
ifdef CUDA
BASE := .[engine,plot,triton,cuda$(CUDA)]
else
BASE := .[engine,plot]
endif
# uv if it is installed, else venv and pip. pip compiles nothing: Python compiles modules when they are imported, and
# compiling all installed modules took a third of the installation time.
install = $(if $(UV),$(UV) pip install --quiet --python,$(BIN)/python -m pip --quiet --disable-pip-version-check --python) $(1)/bin/python $(if $(UV),,install --no-compile)
create = $(if $(UV),$(UV) venv --quiet --python $(PYTHON) $(1),$(PYTHON) -m venv $(2) $(1))

# Tests spend most of their time in compilation. XLA's older emitters compile in half the time of the MLIR emitters.
# Splitting each program into LLVM modules, which XLA compiles in parallel, costs 15% of the compile time. LLVM's expensive
# passes cost 6%.
# `worksteal` gives a worker neighbouring tests, which compile the same programs. pytest prints the slowest tests; the
# JUnit file has the times of all tests.
COMPILE_QUICKLY := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1 \
	--xla_llvm_disable_expensive_passes=true"
# On a GPU, XLA times variants of matrix products while it compiles. Tests of models that take 90 s without it exceed 300 s.
WITHOUT_AUTOTUNING := XLA_FLAGS="$$XLA_FLAGS --xla_gpu_autotune_level=0"
MEASURED := -n auto --dist worksteal --durations=15 --durations-min=1
# Hundreds of processes import the same modules: cache their bytecode even if the environment disables bytecode.
KEEP_BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/.pytest_cache/bytecode
PYTEST := $(KEEP_BYTECODE) $(COMPILE_QUICKLY) $(BIN)/python -m pytest $(MEASURED)

# Compilers that need no GPU exist for Linux on x86-64; on other platforms the compile gate is skipped.
ifeq ($(shell uname -s -m),Linux x86_64)
AOT := .aot/cuda13.stamp .aot/cuda12.stamp
endif

# `test-jax`: versions of jax (0.12 is its newest patch), suites that cover each implementation in minutes, and the packages
# that they need. Nightly versions are only in an index of their own.
JAX := 0.10.2 0.11.2 0.12 nightly
jax_packages = $(if $(filter nightly,$1),$(if $(UV),--prerelease allow,--pre) --extra-index-url $(NIGHTLY) 'jax>0.12.0.1' jaxlib,\
	'jax==$1.*' 'jaxlib==$1.*')
NIGHTLY := https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
CONTRACT_SUITES := tests/contract/test_mla_decode.py tests/contract/test_paged_attention.py tests/contract/test_index_keys.py \
	tests/ops/test_write_kv.py tests/contract/test_compat_jax_gpu.py
OF_CONTRACT_SUITES := editables flatbuffers 'numpy>=2.0' 'jaxtyping>=0.3' 'triton>=3.6' 'flax>=0.12' \
	pytest pytest-xdist pytest-timeout hypothesis chex beartype

.PHONY: help environment demo test test-slow test-aot test-gpu test-mesh test-latest test-jax tile-budget lint format docs bench first-run dist build-dist test-install clean python

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

environment: $(VENV)/all.stamp $(AOT)  ## install the requirements of all other targets

demo: $(VENV)/demo$(CUDA).stamp  ## decode a batch on a small random model and check it (CUDA=13 or 12 for a GPU)
	$(BIN)/python scripts/run_decode.py --verify $(if $(CUDA),--dtype bfloat16)  # the kernels need 16-bit queries

test: $(VENV)/test.stamp $(AOT)  ## all tests that need no GPU and are not marked slow
	$(PYTEST) -m "not slow" --junitxml=.pytest_cache/test.xml

test-slow: $(VENV)/test.stamp $(AOT)  ## the long tests (SHARD=2/8: the second of eight parts)
	$(PYTEST) -m slow $(if $(SHARD),--shard $(SHARD)) --junitxml=.pytest_cache/test-slow$(subst /,-of-,$(addprefix -,$(SHARD))).xml

test-aot: $(VENV)/test.stamp $(AOT)  ## every kernel configuration, compiled for Hopper under both CUDA plugins
	$(PYTEST) tests/aot --junitxml=.pytest_cache/test-aot.xml

test-gpu: $(VENV)/test.stamp  ## tests that need an NVIDIA GPU, contract suites and goldens on compiled kernels (after make demo CUDA=13)
	$(WITHOUT_AUTOTUNING) $(BIN)/python -m pytest -m gpu
	$(WITHOUT_AUTOTUNING) $(BIN)/python -m pytest tests/contract tests/models/test_triton_goldens.py -m "not slow and not gpu" -k "mosaic or triton"

test-mesh: $(VENV)/test.stamp  ## goldens of all families on two GPUs or more, over NCCL, drafts and pages (after make demo CUDA=13)
	$(WITHOUT_AUTOTUNING) XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(BIN)/python -m pytest -n $$(( ($$(nproc) + 3) / 4 )) --maxschedchunk=1 -m "" -k "test_goldens or test_drafts or test_pages" \
		tests/models/test_mesh.py tests/models/test_mesh_speculation.py tests/models/test_mesh_pages.py \
		tests/models/test_gemma_mesh.py tests/models/test_v4_mesh.py

test-latest: | $(BIN)/python  ## the tests, on the newest jax and triton that pyproject.toml admits
	$(call create,.venv-latest,--without-pip)
	$(call install,.venv-latest) --upgrade -e '.[test]' $(if $(AOT),jax-triton)
	.venv-latest/bin/python -c 'import jax; print("jax", jax.__version__)'
	.venv-latest/bin/python -c 'import triton; print("triton", triton.__version__)'
	$(if $(AOT),$(call install,.venv-latest) --no-deps jax-cuda13-plugin==$$(.venv-latest/bin/python -c 'import jax; print(jax.__version__)'))
	@echo "skipped: tests/aot except for Triton (the compilers are pinned to the jax of constraints.txt), and tests marked slow or gpu"
	$(KEEP_BYTECODE) $(COMPILE_QUICKLY) .venv-latest/bin/python -m pytest $(MEASURED) -m "not slow" --ignore-glob='tests/aot/test_[!t]*'

test-jax: $(JAX:%=test-jax-%)  ## contract and compat suites, interpreted, on several versions of jax (JAX="0.10.2 0.12"); writes benchmarks/results/jax_versions.json
	$(BIN)/python -m scripts.tools.jax_versions $(JAX)

# A version that cannot be installed, and tests that fail, do not end the target: the results have the reason.
# `--no-deps`: pip would not install a jax that pyproject.toml does not admit. Packages other than jax are the newest.
test-jax-%: | $(BIN)/python
	rm -rf .venv-jax-$* .pytest_cache/test-jax-$*.xml
	$(call create,.venv-jax-$*,--without-pip)
	-$(call install,.venv-jax-$*) $(call jax_packages,$*) $(OF_CONTRACT_SUITES) >.venv-jax-$*/install.log 2>&1 && \
		$(call install,.venv-jax-$*) --no-deps -e . >>.venv-jax-$*/install.log 2>&1 && \
		$(KEEP_BYTECODE) $(COMPILE_QUICKLY) .venv-jax-$*/bin/python -m pytest $(MEASURED) -m "not slow and not gpu" \
		--junitxml=.pytest_cache/test-jax-$*.xml $(CONTRACT_SUITES)

tile-budget: $(VENV)/test.stamp $(AOT)  ## cost of each kernel's main loop per tile, compared with the time of its memory accesses
	rm -rf .aot/listings
	$(BIN)/python -m tests.aot '*-decode-*-n8' mla-swap-ab-512-64-n16 mla-seesaw-512-64-h128 'ragged-1*-128' paged-prefill-d128 --listings .aot/listings
	$(BIN)/python scripts/tools/tile_budget.py .aot/listings/*.sass --results benchmarks/results
	$(BIN)/python -m tests.aot 'sm100-paged-decode-bf16-d*-n32' 'sm100-paged-decode-bf16-d128-n16' 'sm100-paged-decode-fp8-head-d*-n32' --listings .aot/listings/sm100
	$(BIN)/python scripts/tools/tile_budget.py .aot/listings/sm100/*.sass --bandwidth 8e12 --multiprocessors 148 --clock 1.965e9

lint: $(VENV)/dev.stamp  ## ruff, the type checker and the prose check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check
	$(BIN)/python -m scripts.tools.prose

format: $(VENV)/dev.stamp  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/docs.stamp  ## the documentation as a site in out/docs, which opens offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/demo$(CUDA).stamp  ## measure the engine and the operations here; results go to benchmarks/results
	$(BIN)/python scripts/bench_engine.py
	$(BIN)/python scripts/bench_ops.py paged_decode --grid $(if $(CUDA),gqa-quick,small)
	$(BIN)/python scripts/bench_ops.py write_kv --grid $(if $(CUDA),writes,small)

first-run: $(VENV)/test.stamp $(VENV)/demo$(CUDA).stamp  ## on a new kind of GPU: what runs, what is correct, how fast it is (CUDA=13 or 12)
	$(BIN)/python -m scripts.tools.first_run

dist: installed-core installed-engine  ## build wheel and source distribution in dist/, and run the wheel in empty environments
	@ls dist/*

test-install: dist installed-plot installed-triton installed-all  ## install and run the wheel with each extra in an empty environment
	$(call install,.venv-dist/core) --dry-run -c constraints.txt "$$(echo dist/*.whl)[cuda12]"
	$(call install,.venv-dist/core) --dry-run -c constraints.txt "$$(echo dist/*.whl)[cuda13]"

build-dist: | $(BIN)/python
	rm -rf dist .venv-dist
	$(call create,.venv-dist/build,--without-pip)
	$(call install,.venv-dist/build) -c constraints.txt build hatchling twine
	.venv-dist/build/bin/python -m build --no-isolation --outdir dist . >.venv-dist/build.log 2>&1 || { cat .venv-dist/build.log; exit 1; }
	.venv-dist/build/bin/twine check --strict dist/*

# Prints the number of installed packages and their size.
installed-%: build-dist
	$(call create,.venv-dist/$*,--without-pip)
	$(call install,.venv-dist/$*) -c constraints.txt "$$(echo dist/*.whl)$(if $(filter core,$*),,[$*])"
	cd .venv-dist && $*/bin/python -I ../scripts/tools/check_install.py $*

clean:  ## remove everything that the targets created
	rm -rf .venv .venv-latest .venv-jax-* .venv-dist .aot dist build out/docs .pytest_cache .ruff_cache .hypothesis

python:
	@test -n "$(PYTHON)" || { echo "pallas_attn needs Python 3.12 or newer, and none was found on PATH (name one: make PYTHON=...)"; exit 1; }

$(BIN)/python: | python
	$(call create,$(VENV),)

$(VENV)/demo$(CUDA).stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV)) -c constraints.txt -e '$(BASE)'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV)) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV)) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/all.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV)) -c constraints.txt -e '.[dev,docs]'
	@touch $@ $(VENV)/dev.stamp $(VENV)/docs.stamp $(VENV)/test.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV)) -c constraints.txt -e '.[docs]'
	@touch $@

aot-%: .aot/%.stamp ;

.aot/%.stamp: tests/aot/%.txt | $(BIN)/python
	rm -rf .aot/$*
	$(call install,$(VENV)) --no-deps --target .aot/$* -r $<
	@# Mosaic GPU expects the disassembler in the assembler's folder.
	@cd .aot/$*/nvidia && { test -d cu13/nvvm || ln -s ../../cu13/bin/nvdisasm cuda_nvcc/bin/; }
	@touch $@
