# Each target sets up .venv by itself; with nothing changed that takes no time.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton test-hf-newest lint format docs bench fuzz gpu-compile gpu-report \
	sanitize emulate-avx512 emulate test-cuda sanitize-cuda wheel-check clean

help:            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

NATIVE := CMakeLists.txt $(wildcard src/kalman_attention/csrc/*.h src/kalman_attention/csrc/cpu/*)

# The CUDA kernels for the host: every test of the engines runs them too, where this can be built.
EMULATED := build/cuda/_kla_cuda_emulated.so
EMULATE  := -DKLA_EMULATE_CUDA=ON -DCMAKE_CXX_COMPILER=g++
KERNELS  := CMakeLists.txt $(wildcard $(addprefix src/kalman_attention/csrc/,*.h cuda/* cuda/*/*))

$(EMULATED): $(KERNELS)
	cmake -S . -B build/cuda $(EMULATE) >/dev/null
	cmake --build build/cuda -j 2 --target kla_cuda_emulated >/dev/null

PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

# xlstm asks for CUDA kernels that its mLSTM, to which ours is compared, does not need.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[bench,dev,docs,eval,finetune,int8,onnx,plot,report,score,series,triton,wandb]'
	$(PIP) --no-deps xlstm
	@touch $@

demo: $(STAMP)   ## set up, then filter, train KLA and Mamba for a minute, write a page
	$(BIN)/kla check
	$(BIN)/kla demo

test: $(STAMP)   ## set up, lint, type-check and run all tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory $(EMULATED) || echo "the CUDA kernels are not emulated here"
	KLA_CUDA_EMULATION=$$(ls $(CURDIR)/$(EMULATED) 2>/dev/null) OMP_NUM_THREADS=1 \
	KLA_TEST_INSTALL=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -q $(REPEATABLE)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q $(REPEATABLE) $(INTERPRETED)

# The same examples each time, so that a failure belongs to a change; plain pytest draws new ones.
REPEATABLE := --hypothesis-profile=ci

# Triton's interpreter is chosen when triton is imported, so it takes a process of its own.
INTERPRETED := tests/ops/test_triton.py tests/tools/test_roofline.py

test-triton: $(STAMP) ## all tests of the op with the Triton engine, in its interpreter (slow)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/ops -k triton

# torch stays as pinned; transformers and all it brings are the newest that pyproject.toml allows.
test-hf-newest:  ## run the tests of the adapter with the newest transformers
	$(PYTHON) -m venv $(VENV)-hf
	grep '^torch==' constraints.txt > $(VENV)-hf/torch.txt
	$(VENV)-hf/bin/pip install -q --disable-pip-version-check --upgrade \
		--upgrade-strategy eager -c $(VENV)-hf/torch.txt -e '.[dev,hf,plot]'
	$(VENV)-hf/bin/pip list --disable-pip-version-check | grep -E '^(torch|transformers) '
	OMP_NUM_THREADS=1 $(VENV)-hf/bin/python -m pytest -n 2 -q tests/models/hf

lint: $(STAMP)   ## formatter, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the code in house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The variable silences a notice: the theme ends in May 2027, and its successor reads mkdocs.yml too.
docs: $(STAMP)   ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## speed of the engines on this machine
	$(BIN)/kla bench scan

CASES ?= 100000
fuzz: $(STAMP)   ## random calls at the edges of the contract against the reference (CASES, SEED, ENGINE)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(or $(SEED),0) \
		--engine $(or $(ENGINE),cpu)

gpu-compile: $(STAMP) ## compile the GPU engines without a GPU; registers, spills, shared memory
	$(BIN)/kla check --compile --out runs/gpu-compile/resources.md

gpu-report: $(STAMP) ## on a machine with a GPU: tests, speed and figures of the GPU engines
	$(BIN)/python -m pytest -q tests/ops/test_gpu.py
	$(BIN)/kla bench gpu --out runs/gpu-report

sanitize: $(STAMP) ## the native kernel's tests with AddressSanitizer and UBSan
	cmake -S . -B build/sanitize -DKLA_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ >/dev/null
	cmake --build build/sanitize -j 2
	KLA_CPU_LIBRARY=$(CURDIR)/build/sanitize/_kla_cpu.so OMP_NUM_THREADS=2 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	$(BIN)/python -m pytest -q -p no:xdist tests/ops -k "(cpu or linear or matrix_scan) and not inductor"

emulate-avx512: $(STAMP) ## the kernel's 64-byte vectors on a machine that has only AVX2
	cmake -S . -B build/emulate -DKLA_EMULATE_AVX512=ON >/dev/null
	cmake --build build/emulate -j 2
	KLA_CPU_LIBRARY=$(CURDIR)/build/emulate/_kla_cpu.so OMP_NUM_THREADS=2 \
	$(BIN)/python -m pytest -q -p no:xdist tests/ops -k "(cpu or linear or matrix_scan) and not inductor"

# The engine's own tests, its calls sent to the library in an emulator (tests/native). Debian's
# packages: g++-aarch64-linux-gnu qemu-user. Not there: OpenMP, fork, Python and torch.
ARM      := aarch64-linux-gnu
EMULATED_TESTS ?= tests/ops/test_cpu_kernel.py tests/ops/test_cpu_rows.py tests/ops/test_cpu_segments.py \
	tests/ops/test_cpu_slots.py \
	tests/ops/test_edges.py tests/ops/test_engines.py tests/ops/test_frames.py tests/ops/test_gaps.py \
	tests/ops/test_matrix_scan.py tests/ops/test_shared_precision.py tests/ops/test_smooth.py tests/nn/test_decoding.py
ON_REMOTE = OMP_NUM_THREADS=1 $(BIN)/python -m tests.native.selfcheck $(1) && \
	OMP_NUM_THREADS=1 KLA_REMOTE_CPU="$(1)" $(BIN)/python -m pytest -q -p no:xdist \
	-p tests.native.remote $(EMULATED_TESTS) -k "(cpu or linear or matrix_scan or decod) and not inductor $(LOCAL_ONLY)"
LOCAL_ONLY := and not fork and not failure and not missing_library and not openmp

emulate: $(STAMP) ## the native kernels on ARM (NEON) and on x86-64 without AVX, under qemu-user
	cmake -S . -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(ARM)-g++ $(EMULATE_FLAGS) >/dev/null
	cmake --build build/aarch64 -j 2 >/dev/null
	$(ARM)-g++ -std=c++17 -O1 tests/native/calls.cpp -o build/aarch64/calls -ldl
	$(call ON_REMOTE,qemu-aarch64 -L /usr/$(ARM) build/aarch64/calls build/aarch64/_kla_cpu.so)
	g++ -std=c++17 -O1 tests/native/calls.cpp -o build/calls -ldl
	$(call ON_REMOTE,qemu-x86_64 -cpu Nehalem build/calls src/kalman_attention/ops/cpu/_kla_cpu.so)

# Rows cut at every chunk, threads in random order, every program through NVRTC and nvcc.
test-cuda: $(STAMP) $(EMULATED) ## the CUDA kernels on the host, and compiled for three devices
	KLA_CUDA_EMULATION=$(CURDIR)/$(EMULATED) OMP_NUM_THREADS=1 \
	$(BIN)/python -m pytest -n 2 -q tests/ops -k "cuda and not inductor"
	KLA_CUDA_EMULATION=$(CURDIR)/$(EMULATED) OMP_NUM_THREADS=1 \
	KLA_CUDA_SCHEDULE=split KLA_CUDA_EMULATION_SEED=1 \
	$(BIN)/python -m pytest -n 2 -q tests/ops -k "cuda and not inductor and not compile"
	$(PIP) -e '.[cuda]'
	KLA_TEST_COMPILE=1 $(BIN)/python -m pytest -n 2 -q tests/ops/cuda/test_compile.py

sanitize-cuda: $(STAMP) ## the emulated CUDA kernels with AddressSanitizer and UBSan
	cmake -S . -B build/cuda-sanitize $(EMULATE) -DKLA_SANITIZE=ON >/dev/null
	cmake --build build/cuda-sanitize -j 2 --target kla_cuda_emulated >/dev/null
	KLA_CUDA_EMULATION=$(CURDIR)/build/cuda-sanitize/_kla_cuda_emulated.so OMP_NUM_THREADS=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	$(BIN)/python -m pytest -q -p no:xdist tests/ops -k "cuda and not inductor and not compile"

wheel-check: $(STAMP) ## build archive and wheel, install them where there is no compiler, use them
	rm -rf dist
	$(BIN)/python -m build $(BUILD_FLAGS) --outdir dist .
	KLA_TEST_DIST=dist $(BIN)/python -m pytest -q -p no:xdist \
		tests/first_hour/test_archives.py tests/first_hour/test_install.py

clean:           ## remove the environment and everything generated
	rm -rf $(VENV) $(VENV)-hf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
