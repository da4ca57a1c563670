# SPDX-License-Identifier: MIT
# The library is its headers and needs no build. This file builds the examples, tests and benchmarks in build/ and runs
# them.
#
#     make CC=clang CFLAGS=-O3 test      uses another compiler, other flags
#     make lib CPPFLAGS=-DKVPRIM_DEBUG   CPPFLAGS reach all that this file compiles, by nvcc too; CFLAGS what is C, and
#                                        in `make lib` also nvcc's host compiler, if they are given
#     make JOBS=1 test                   runs the parts of the tests one by one, not side by side
#     make run TRACE=path ARGS='...'     replays another trace, with options of the example
#     make run DEVICE=cpu                or cuda; default: a GPU if there is one, and nvcc
#     make cuda-bench CUDA_ARCH='sm_80 sm_90 sm_100'   builds for all of these at once, as engines ship
#     CUDA_HOME, NCCL_HOME               say where CUDA and NCCL are, if not on PATH or in the usual places; NCCL is
#                                        then searched for only there
#     make nccl-test NCCL_OTHERS='...'   tests with these libnccl.so.2 of other versions, too
#     make nccl-test WORLDS='3 5 8'      with so many ranks alone; also nccl-bench and nccl-limits: tests/nccl/nccl.sh
#     make BUILD=/tmp/kvprim test        builds in that folder, not in build/: this one may be read-only. Links to the
#                                        sources are made there. `make results` and `make plots` write to the sources.

# Quotes a name for the shell, whatever it holds.
quoted = '$(subst ','\'',$(1))'

ifneq ($(if $(findstring command,$(origin BUILD)),$(BUILD)),)

LINKS = Makefile README.md kvprim.h kvprim_cuda.cuh kvprim_nccl.h .ci .clang-format examples tests
$(or $(firstword $(MAKECMDGOALS)),help): FORCE
	$(if $(filter clean,$(MAKECMDGOALS)),$(error make clean removes only build/: remove $(BUILD) yourself))
	@mkdir -p $(call quoted,$(BUILD)) && cd $(call quoted,$(BUILD)) && { [ -L build ] || ln -s . build; } && \
	    from=$(call quoted,$(CURDIR)) && for name in $(LINKS); do \
	    [ $$name -ef "$$from/$$name" ] || { [ ! -e $$name ] && ln -s "$$from/$$name" .; } || \
	    { echo BUILD=$(call quoted,$(BUILD)): $$name is in the way; exit 1; }; done
	@$(MAKE) --no-print-directory -C $(call quoted,$(BUILD)) BUILD= FROM=$(call quoted,$(CURDIR)) $(MAKECMDGOALS)
$(wordlist 2,99,$(MAKECMDGOALS)): $(firstword $(MAKECMDGOALS))
	@:
FORCE:
.PHONY: FORCE $(MAKECMDGOALS)

else

# Expands to the first of several commands that exists. (The redirection makes make ask a shell: `command` is no
# program.)
first = $(firstword $(foreach name,$(1),$(shell command -v $(name) 2>/dev/null)))

# If no compiler is named, take a usual one. None need exist.
ifeq ($(origin CC),default)
CC := $(or $(notdir $(call first,cc gcc clang)),cc)
endif
ifeq ($(origin CXX),default)
CXX := $(notdir $(call first,c++ g++ clang++))
endif

CFLAGS ?= -O2 -g
CXXFLAGS ?= -O3 -g
WARNINGS = -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef
COMPILE_C = $(CC) -std=c11 $(WARNINGS) $(CPPFLAGS) $(CFLAGS) -pthread -I.
COMPILE_CXX = $(CXX) -std=c++17 $(WARNINGS) $(CPPFLAGS) $(CXXFLAGS) -pthread -I.

# Without a GPU, nvcc takes its oldest architecture for `native` and does not say so. These are taken instead, as far as
# it knows them; each adds 10 s to a program's compilation. What is built for sm_80 also runs on sm_86, and so on.
CUDA_ARCH ?= native
USUAL = 80 90
lib build/libkvprim_cuda.so build/libkvprim_nccl.so: USUAL = 80 90 100 120
KNOWN = $(eval KNOWN := $$(shell $$(NVCC) --list-gpu-arch 2>/dev/null))$(KNOWN)
BUILT_FOR = $(or $(strip $(if $(filter native,$(CUDA_ARCH)),$(if $(GPU_HERE),,$(foreach arch,$(USUAL),$(if $(filter \
    compute_$(arch),$(KNOWN)),sm_$(arch)))))),$(CUDA_ARCH))
ARCHITECTURES = $(if $(word 2,$(BUILT_FOR)),$(foreach arch,$(BUILT_FOR:sm_%=%),-gencode \
    arch=compute_$(arch),code=sm_$(arch)),-arch=$(BUILT_FOR))
NO_GPU = $(if $(filter-out $(CUDA_ARCH),$(BUILT_FOR)), for $(BUILT_FOR) (no GPU is here; CUDA_ARCH=sm_90 chooses))
COMPILE_CUDA = $(or $(NVCC),$(error no nvcc: neither on PATH, nor under CUDA_HOME, nor in the usual places)) \
    -std=c++17 -O3 $(ARCHITECTURES) -lineinfo $(CPPFLAGS) -I.

# A program as it is run where make was called, where a relative TRACE begins.
called = $(if $(findstring command,$(origin FROM)),cd $(call quoted,$(FROM)) && $(call quoted,$(CURDIR)/$(1)),$(1))

TRACE ?= examples/02_kv_replay/trace_small.jsonl
ARGS ?=
FUZZ_SECONDS ?=
DEVICE ?=

ifneq ($(and $(findstring command,$(origin CUDA_HOME)),$(CUDA_HOME),$(findstring undefined,$(origin NVCC)),\
    $(filter-out clean help,$(or $(MAKECMDGOALS),help))),)
$(if $(wildcard $(CUDA_HOME)/bin/nvcc),,$(error CUDA_HOME=$(CUDA_HOME): no bin/nvcc there (make takes no spaces)))
endif
# Searched for only if a target uses them.
NVCC ?= $(or $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc))),$(call first,nvcc),$(firstword $(wildcard \
    /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc /usr/lib/nvidia-cuda-toolkit/bin/nvcc)))
CUDA_PLACES = $(CUDA_HOME) $(NVCC:%/bin/nvcc=%) /usr/local/cuda /opt/cuda /usr
NCCL_PLACES = $(or $(NCCL_HOME),$(CUDA_PLACES) /usr/local /opt/nccl)
CUDA_INCLUDE ?= $(patsubst %/cuda_runtime.h,%,$(firstword $(wildcard $(CUDA_PLACES:%=%/include/cuda_runtime.h))))
NCCL_INCLUDE ?= $(patsubst %/nccl.h,%,$(firstword $(wildcard $(NCCL_PLACES:%=%/include/nccl.h))))
NCCL_LIBRARY ?= $(firstword $(wildcard $(foreach place,$(NCCL_PLACES),$(foreach folder,lib lib64 lib/x86_64-linux-gnu \
    lib/aarch64-linux-gnu,$(place)/$(folder)/libnccl.so.2))))
ifneq ($(and $(NCCL_HOME),$(filter gpu-test nccl-% handover gpu-bench sanitize engine ncu,$(MAKECMDGOALS))),)
$(if $(and $(NCCL_INCLUDE),$(NCCL_LIBRARY)),,$(error NCCL_HOME=$(NCCL_HOME): no nccl.h or no libnccl.so.2 there (make \
    takes no spaces)))
endif

HEADERS = kvprim.h kvprim_cuda.cuh kvprim_nccl.h $(wildcard examples/*/*.h tests/*.h tests/*/*.h)
EXAMPLES = build/01_rows build/02_kv_replay build/18_step build/21_keys

help:
	@echo 'make run       build the replay example and replay a small trace (TRACE=path: another one; ARGS=options)'
	@echo 'make examples  build the examples'
	@echo 'make lib       build build/libkvprim.so and libkvprim_nccl.so, the C functions for other languages'
	@echo 'make test      test every function that this machine can test, in two to three minutes'
	@echo 'make check     run all other tests: compilers, languages, processors, GPU architectures, sanitizers, fuzzers'
	@echo 'make replay    measure the replay of a trace (TRACE=path DEVICE=cpu or cuda), output to build/results/'
	@echo 'make fuzz      run only the fuzzers (FUZZ_SECONDS=600: each as long; without, a fixed number of inputs)'
	@echo 'make bench     run the benchmarks of the host; takes minutes and needs an idle machine'
	@echo 'make keys-bench    time keys of blocks on the host beside the engines'\'' Python'
	@echo 'make plots     draw the pictures and the figures in README.md from tests/results/'
	@echo 'make gpu-test  build and run the tests on a GPU, output to build/results/ (CUDA_ARCH=sm_90: for another GPU);'
	@echo '               cuda-test: all except the collectives; nccl-test: only those (QUICK=quick: in minutes)'
	@echo 'make torch     build the package for Python and PyTorch in build/python, and test it (examples/python)'
	@echo 'make wheel     build a wheel of it in build/ (KVPRIM_CUDA_ARCH="80 90 100 120")'
	@echo 'make engine    build and run examples/07_engine on 1 to 4 GPUs'
	@echo 'make gpu-bench run the benchmarks on a GPU against their opponents, output to build/results/'
	@echo '               cuda-bench, convert-bench, transfer-bench, fetch-bench, nccl-bench: parts of that'
	@echo 'make nccl-limits   measure each way of the collectives, and suggest limits for kvprim_nccl.h'
	@echo '               nccl-test, nccl-bench and nccl-limits take WORLDS="3 5 8": only with so many ranks'
	@echo 'make handover  hand KV pages over between two GPUs (examples/14_handover), output to build/results/'
	@echo 'make torch-bench, transformers   compare with PyTorch, and a paged cache with transformers'\'' DynamicCache'
	@echo 'make bandwidth measure the bandwidth of a GPU'\''s memory, output to build/results/'
	@echo 'make sanitize  run each kernel under compute-sanitizer: synccheck, racecheck, memcheck, initcheck'
	@echo 'make sass      dump and check the kernels for CUDA_ARCH: 128-bit accesses, no spills (make cfg: draw them;'
	@echo '               make nvdisasm KERNEL=...: list them with source lines and registers in use)'
	@echo 'make weight    measure lines, kernels and seconds of nvcc (make weight-compare A=old.txt B=new.txt: of kernels)'
	@echo 'make ncu       check the counters of each operation on a GPU (make ncu-compare A=old.csv B=new.csv;'
	@echo '               make ncu-source KERNEL=...: hot lines; make nsys PROGRAM=...: where its time went)'
	@echo 'make results   copy what was measured from build/results/ to tests/results/, which are committed'
	@echo 'make clean     remove build/'

# Targets that run programs run one after the other, whatever -j says: they share the GPUs.
RUN = run replay test check fuzz bench keys-bench plots gpu-test cuda-test nccl-test engine gpu-bench cuda-bench \
    convert-bench transfer-bench fetch-bench nccl-bench nccl-limits bandwidth handover wheel torch torch-bench \
    transformers sanitize cuda-sanitize nccl-sanitize sass cfg nvdisasm ncu ncu-source nsys results weight
ifneq ($(word 2,$(filter $(RUN),$(MAKECMDGOALS))),)
.NOTPARALLEL:
endif

# Runs all parts, also after one that failed.
each = +@code=0; for part in $(1); do $(MAKE) --no-print-directory $$part || code=1; done; exit $$code

# Keeps what the commands print. A command that fails sets failed=1; what was printed is then kept under another name,
# which `make results` does not copy.
RESULTS = build/results
keep = @mkdir -p $(RESULTS); (failed=0; $(2); exit $$failed) >$(RESULTS)/$(1).txt 2>&1; code=$$?; \
    cat $(RESULTS)/$(1).txt; [ $$code -eq 0 ] || mv $(RESULTS)/$(1).txt $(RESULTS)/$(1).failed; exit $$code

# Prerequisites are expanded twice, so that no other target asks for a GPU.
.SECONDEXPANSION:
GPU_HERE = $(eval GPU_HERE := $$(and $$(NVCC),$$(shell nvidia-smi -L 2>/dev/null | grep -o '^GPU')))$(GPU_HERE)
run: build/02_kv_replay$$(if $$(or $$(filter cuda,$$(DEVICE)),$$(if $$(DEVICE),,$$(GPU_HERE))),_cuda)
	$(call called,$<) $(DEVICE:%=--device %) $(ARGS) $(call quoted,$(TRACE))

ENVIRONMENT = CC='$(CC)' CXX='$(CXX)' FUZZ_SECONDS='$(FUZZ_SECONDS)'
CUDA_ENVIRONMENT = NVCC='$(NVCC)' CUDA_INCLUDE='$(CUDA_INCLUDE)' NCCL_INCLUDE='$(NCCL_INCLUDE)' \
    NCCL_LIBRARY='$(NCCL_LIBRARY)' CUDA_ARCH='$(CUDA_ARCH)' CUDA_HOME='$(CUDA_HOME)'
parts = $(foreach part,$(1),'test sh tests/build/parts.sh $(part) build/$(part)')
REPLAY_TEST = 'test sh "build/a folder/tests/core/test_replay.sh" $(1) build/02_kv_replay build/test_replay'

# Tests of both: `test` runs fewer of their cases.
IN_BOTH = $(foreach part,emulated core collectives,'test sh tests/build/parts.sh $(part) build/$(part) $(1)') \
    $(call REPLAY_TEST,$(1))
IN_TEST = $(call parts,callers nccl trace) \
    'test MAKEFLAGS= make -s build/test_disk && build/test_disk' $(call parts,readme profile)
IN_CHECK = $(call parts,programs nccl_cuda systems compilers nccl_headers kernels matrix fuzzers symbols sanitizers) \
    'test MAKEFLAGS= make -s build/test_kvprim_no_simd && build/test_kvprim_no_simd' \
    $(call parts,callers_cuda format pictures documents)

# What takes long begins first. The replay is tested through a folder with a space in its name, as users have them.
test check: build/02_kv_replay
	@ln -sfn "$$PWD" 'build/a folder'
	@$(ENVIRONMENT) $(CUDA_ENVIRONMENT) sh tests/run.sh $(TESTS)
test: TESTS = $(call IN_BOTH,quick) $(IN_TEST)
check: TESTS = $(IN_BOTH) $(IN_CHECK)

# One part of either.
part-%: build/02_kv_replay
	@$(ENVIRONMENT) $(CUDA_ENVIRONMENT) sh tests/build/parts.sh $* build/$*

fuzz:
	@$(ENVIRONMENT) sh tests/build/parts.sh fuzzers build/fuzzers

bench: build/bench_prefix build/bench_host
	$(call keep,bench,sha256sum kvprim.h; build/bench_prefix || failed=1; build/bench_host || failed=1)

# XXH3's keys are measured where there is an xxhash.h.
keys-bench: build/bench_keys
	$(call keep,keys,sha256sum kvprim.h; build/bench_keys || failed=1; python3 tests/bench/bench_keys.py || failed=1)

# Writes replay.txt or, with DEVICE=cuda, gpu_replay.txt. Those that are committed are of Mooncake's conversation trace.
REPLAYS = '' '--slots 2000000' '--page 256 --slots 2000000 --host-slots 16000000 --disk-slots 80000000'
replay: build/02_kv_replay$$(if $$(filter cuda,$$(DEVICE)),_cuda)
	$(call keep,$(if $(filter cuda,$(DEVICE)),gpu_)replay,\
	    sha256sum kvprim.h $(if $(filter cuda,$(DEVICE)),kvprim_cuda.cuh); \
	    for options in $(REPLAYS); do echo "== 02_kv_replay --kv-bytes 64 $$options"; \
	    $(call called,$<) $(DEVICE:%=--device %) --kv-bytes 64 $$options $(call quoted,$(TRACE)) || failed=1; done)

results:
	@ls build/results/*.txt >/dev/null 2>&1 || { echo 'make results: nothing in build/results/; measure first'; exit 1; }
	@! cat build/results/*.txt | grep '^[0-9a-f]\{64\}  kvprim' | sha256sum -c 2>/dev/null | grep FAILED || \
	    { echo 'make results: some of build/results/ are of other headers; remove them'; exit 1; }
	cp build/results/*.txt $(wildcard build/results/*.svg) tests/results/

plots:
	@command -v python3 >/dev/null || { echo 'make plots: no python3; install it, it needs nothing else'; exit 1; }
	python3 tests/bench/plots.py

# ---- on a machine with a GPU ----

# Checksums say which headers a result was measured with.
CHECKSUMS = sha256sum kvprim.h kvprim_cuda.cuh
GPU_EXAMPLES = build/03_kv_store build/04_unpack build/05_offload build/11_compact build/15_rope_store \
    build/16_fp8 build/19_warp_copy build/22_sparse
NCCL_EXAMPLES = build/06_allreduce build/14_handover build/17_all_reduce_norm build/20_ring_unpack \
    $(MPI_HERE:%=build/06_allreduce_mpi)
GPU_TESTS = build/test_cuda build/test_cuda_debug build/02_kv_replay_cuda
GPU_BENCHES = build/bench_step build/bench_cuda build/bench_paged build/bench_slots build/bench_unpack \
    build/bench_layouts

# CUPTI lies beside CUDA or in its own folder there. Not every installation of CUDA has it.
CUPTI_PLACES = $(CUPTI_HOME) $(CUDA_PLACES) $(CUDA_PLACES:%=%/extras/CUPTI)
CUPTI_INCLUDE ?= $(patsubst %/cupti.h,%,$(firstword $(wildcard $(CUPTI_PLACES:%=%/include/cupti.h))))
CUPTI_LIBRARY ?= $(firstword $(wildcard $(foreach place,$(CUPTI_PLACES),$(foreach folder,lib64 lib \
    lib/x86_64-linux-gnu lib/aarch64-linux-gnu,$(place)/$(folder)/libcupti.so $(place)/$(folder)/libcupti.so.1[2-9]))))
CUPTI_HERE = $(and $(CUPTI_INCLUDE),$(CUPTI_LIBRARY))
# Records a trace, and checks it against the format; with python3, also against an independent count.
RECORD_TRACE = build/10_trace --out build/10_trace.json || failed=1; ! command -v python3 >/dev/null || { \
    python3 examples/10_trace/answers.py build/10_trace.json --range 'storing cache' --family kvpc_ --top 10 && \
    python3 tests/trace/test_trace.py build/10_trace.json; } || failed=1
NO_TRACE = echo 'skip build/10_trace: no cupti.h or libcupti.so (under CUPTI_HOME, CUDA_HOME or its extras/CUPTI)'

# Fails before anything is built, whatever -j says.
ifneq ($(filter gpu-test cuda-test gpu-bench cuda-bench convert-bench transfer-bench fetch-bench torch-bench \
    transformers sanitize cuda-sanitize bandwidth engine ncu ncu-source,$(MAKECMDGOALS)),)
$(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),,$(error no GPU here: nvidia-smi lists none))
endif

# Everything that README names; `make wheel` builds the package, and 13_transformers is Python.
NCCL_HERE = $(and $(NCCL_INCLUDE),$(NCCL_LIBRARY))
MPI_HERE = $(call first,mpicxx)
examples: $(EXAMPLES) $$(if $$(NVCC),$$(GPU_EXAMPLES) build/09_bandwidth build/02_kv_replay_cuda example_engine \
    $$(if $$(CUPTI_HERE),build/10_trace) $$(if $$(NCCL_HERE),$$(NCCL_EXAMPLES)))
	@$(if $(NVCC),$(if $(CUPTI_HERE),:,$(NO_TRACE)),echo 'skip the examples for a GPU: no nvcc')
	@$(if $(NVCC),$(if $(NCCL_HERE),:,echo 'skip $(NCCL_EXAMPLES): no nccl.h or no libnccl.so.2 (NCCL_HOME)'),:)
	@$(if $(MPI_HERE),:,echo 'skip build/06_allreduce_mpi: no mpicxx')
	@$(if $(and $(NVCC),$(NO_GPU)),echo 'examples for a GPU: built$(NO_GPU)',:)

# cuda-* need one GPU. nccl-bench and nccl-limits need two or more. nccl-test takes all, or a single one for many ranks;
# nccl-sanitize takes one.
gpu-test:
	$(call each,cuda-test nccl-test engine documents)
documents:
	@sh tests/documents.sh gpu
gpu-bench:
	$(call each,cuda-bench convert-bench transfer-bench fetch-bench nccl-bench)
sanitize:
	$(call each,cuda-sanitize nccl-sanitize)

cuda-test: $(GPU_EXAMPLES) $(GPU_TESTS) $$(if $$(CUPTI_HERE),build/10_trace)
	$(call keep,gpu_test,$(CHECKSUMS)$(GPU_EXAMPLES:%=; % || failed=1); build/test_cuda || failed=1; \
	    build/test_cuda_debug quick || failed=1; \
	    sh tests/core/test_replay.sh gpu build/02_kv_replay_cuda build/test_replay_gpu || failed=1; \
	    $(if $(CUPTI_HERE),$(RECORD_TRACE),$(NO_TRACE)))

cuda-bench: $(GPU_BENCHES)
	$(call keep,gpu_bench,$(CHECKSUMS)$(GPU_BENCHES:%=; % || failed=1))

convert-bench: build/bench_convert
	$(call keep,gpu_convert,$(CHECKSUMS); build/bench_convert || failed=1)

transfer-bench: build/bench_transfer
	$(call keep,gpu_transfer,$(CHECKSUMS); build/bench_transfer || failed=1)

fetch-bench: build/bench_fetch
	$(call keep,gpu_fetch,$(CHECKSUMS); build/bench_fetch || failed=1)

nccl-test nccl-bench nccl-limits nccl-sanitize handover:
	@$(CUDA_ENVIRONMENT) sh tests/nccl/nccl.sh $(@:nccl-%=%) $(QUICK)

# Measures the memory's bandwidth. Takes seconds and does not depend on the headers.
bandwidth: build/09_bandwidth
	$(call keep,gpu_bandwidth,build/09_bandwidth || failed=1)

# The package for Python, for the GPU here if there is one. Needs a python3 with its headers, and torch's headers.
PYTHON_ENVIRONMENT = CC='$(CC)' CXX='$(CXX)' NVCC='$(NVCC)'
USE_PACKAGE = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=build/python python3
build/python/built: $(wildcard examples/python/*.py examples/python/*/*) $(HEADERS) build/flags
	@$(PYTHON_ENVIRONMENT) KVPRIM_CUDA_ARCH='$(or $(KVPRIM_CUDA_ARCH),$(if $(NVCC),$(BUILT_FOR),none))' \
	    python3 examples/python/build_backend.py build/python
	@touch $@
wheel:
	@mkdir -p build && rm -f build/kvprim-*.whl
	@cd examples/python && $(PYTHON_ENVIRONMENT) python3 -c \
	    'import build_backend; print("build/" + build_backend.build_wheel("$(CURDIR)/build"))'

# These need a python3 that has torch. Without a GPU they run on the CPU.
torch: build/python/built
	$(call keep,gpu_torch_ops,$(CHECKSUMS) kvprim_nccl.h; for test in kvprim collectives engines; do \
	    $(USE_PACKAGE) examples/python/tests/test_$$test.py || failed=1; done)

# Compares with PyTorch, if python3 has it.
torch-bench: build/python/built
	$(call keep,gpu_torch,$(CHECKSUMS); $(USE_PACKAGE) tests/bench/bench_torch.py || failed=1)

# Compares a paged cache for transformers with its DynamicCache, if python3 has them.
transformers: build/python/built
	$(call keep,gpu_transformers,$(CHECKSUMS); $(USE_PACKAGE) examples/13_transformers/run.py || failed=1)

# Runs on all GPUs, up to four. NVLink multicast is off, as in tests/gpu/environment.sh.
example_engine:
	@$(MAKE) -C examples/07_engine CC='$(CC)' NVCC='$(NVCC)' CUDA_ARCH='$(BUILT_FOR)' BUILD='$(CURDIR)/build/07_engine'
engine: example_engine
	NCCL_NVLS_ENABLE=$${NCCL_NVLS_ENABLE:-0} build/07_engine/engine $(ARGS)

# These look at the kernels as the compiler made them, and as they run. Each target names the tool it lacks.
PROFILE = command -v python3 >/dev/null || \
    { echo 'make $@: no python3; install it, it needs nothing else' >&2; exit 1; }; \
    $(CUDA_ENVIRONMENT) python3 tests/profile/profile.py
sass cfg:
	@$(PROFILE) $@

ncu:
	$(call keep,gpu_ncu,$(CHECKSUMS) $(NCCL_INCLUDE:%=kvprim_nccl.h); $(PROFILE) ncu || failed=1)

cuda-sanitize: build/test_cuda
	$(call keep,gpu_sanitize,$(CHECKSUMS); $(PROFILE) sanitize || failed=1)

weight:
	$(call keep,weight,$(CHECKSUMS) $(NCCL_INCLUDE:%=kvprim_nccl.h); \
	    $(CUDA_ENVIRONMENT) python3 tests/profile/weight.py || failed=1)
weight-compare:
	@python3 tests/profile/weight.py compare $(call quoted,$(A)) $(call quoted,$(B))

ncu-compare:
	@$(PROFILE) compare $(call quoted,$(A)) $(call quoted,$(B))

# KERNEL is a regular expression for a kernel's name.
KERNEL ?= kvpc_gather_kernel
nvdisasm:
	@$(PROFILE) $@ $(call quoted,$(KERNEL))
ncu-source:
	@$(PROFILE) source $(call quoted,$(KERNEL))

# The default program is built only where there is nsys.
PROGRAM ?= build/02_kv_replay_cuda --device cuda $(ARGS) $(call quoted,$(TRACE))
nsys:
	@$(PROFILE) $@
	@$(if $(filter file,$(origin PROGRAM)),$(MAKE) --no-print-directory build/02_kv_replay_cuda)
	@$(PROFILE) $@ $(PROGRAM)

# ---- programs and libraries ----

build/09_bandwidth: examples/09_bandwidth/bandwidth.cu $(wildcard examples/09_bandwidth/*) \
    examples/02_kv_replay/kv_disk.h examples/gpu.cuh build/flags
	$(COMPILE_CUDA) $< -o $@

# The headers' implementation takes most of the time that such a program takes to compile, so it is compiled once.
build/kvprim_all.o: $(HEADERS) build/flags
	@printf '#include "kvprim_cuda.cuh"\n#include "kvprim_nccl.h"\n' >build/kvprim_all.cu
	@$(CUDA_ENVIRONMENT) sh -c '. tests/gpu/environment.sh && set -x && $(COMPILE_CUDA) $$nccl_flags \
	    -DKVPRIM_IMPLEMENTATION -c build/kvprim_all.cu -o $@'
ELSEWHERE = $(foreach part,CORE_IMPLEMENTED CUDA_IMPLEMENTED NCCL_IMPLEMENTED NCCL_LAYOUT NCCL_KERNELS,-DKVPRIM_$(part))
build/06_allreduce build/06_allreduce_mpi: build/%: examples/%.c
build/06_allreduce_mpi: private CPPFLAGS += -ccbin mpicxx
build/14_handover: examples/14_handover/handover.cu
build/17_all_reduce_norm build/20_ring_unpack: build/%: examples/%.cu
$(NCCL_EXAMPLES): build/kvprim_all.o examples/gpu.cuh $(wildcard examples/14_handover/*.*h) build/flags
	@$(CUDA_ENVIRONMENT) sh -c '. tests/gpu/environment.sh && set -x && $(COMPILE_CUDA) $$nccl_flags $(ELSEWHERE) \
	    -x cu $(filter %.c %.cu,$^) -Xlinker $< -o $@ $$nccl_link'

build/10_trace: examples/10_trace/trace.cu examples/gpu.cuh $(HEADERS) build/flags
	$(COMPILE_CUDA) -I$(CUPTI_INCLUDE) $< -o $@ -Xlinker $(CUPTI_LIBRARY) -Xlinker -rpath -Xlinker $(dir $(CUPTI_LIBRARY))

$(GPU_EXAMPLES): build/%: examples/%.cu examples/gpu.cuh $(HEADERS) build/flags
	$(COMPILE_CUDA) $< -o $@

build/kvprim_cuda.o: kvprim.h kvprim_cuda.cuh build/flags
	@echo '#include "kvprim_cuda.cuh"' >build/kvprim_cuda.cu
	$(COMPILE_CUDA) -DKVPRIM_CUDA_IMPLEMENTATION -c build/kvprim_cuda.cu -o $@

# This program is C, except for that object; nvcc links it, for the libraries of the object.
build/02_kv_replay_cuda: examples/02_kv_replay/kv_replay.c build/kvprim_cuda.o $(HEADERS) build/flags
	$(COMPILE_C) $(CUDA_INCLUDE:%=-isystem %) -DKV_REPLAY_CUDA -c $< -o $@.o
	$(NVCC) $@.o build/kvprim_cuda.o -o $@ $(LDFLAGS)

build/test_cuda_debug: tests/gpu/test_cuda.cu $(HEADERS) build/flags
	$(COMPILE_CUDA) -DKVPRIM_DEBUG $< -o $@

build/test_cuda: tests/gpu/test_cuda.cu $(HEADERS) build/flags
	$(COMPILE_CUDA) $< -o $@

$(GPU_BENCHES) build/bench_convert build/bench_transfer build/bench_fetch: build/%: tests/bench/%.cu $(HEADERS) \
    build/flags
	$(COMPILE_CUDA) $< -o $@

# The library for other languages. CUDA's runtime is linked in and exports nothing, so no libcudart.so must be found. It
# shares the device's context with any other runtime in the process, such as torch's, whatever their versions are.
# The collectives are a library of their own, which takes the libnccl.so.2 of its process.
lib: build/libkvprim_$$(if $$(NVCC),cuda,host).so $$(if $$(and $$(NVCC),$$(NCCL_INCLUDE),$$(NCCL_LIBRARY)),\
    build/libkvprim_nccl.so)
	@ln -sf $(<F) build/libkvprim.so
	@echo 'build/libkvprim.so: $(if $(NVCC),for CPU and GPU$(and $(NO_GPU),:$(NO_GPU)),host functions alone: no nvcc)'
	@$(if $(NVCC),$(if $(NCCL_HERE),:,echo 'skip libkvprim_nccl.so: no nccl.h or no libnccl.so.2 (NCCL_HOME)'),:)

# nvcc splits its host compiler's options at commas. The defaults of CFLAGS are for C programs only.
comma = ,
escaped = $(subst $(comma),\$(comma),$(CFLAGS))
HOST_CFLAGS = $(if $(filter-out file default undefined,$(origin CFLAGS)),$(escaped:%=-Xcompiler '%'))
build/libkvprim_cuda.so: kvprim_cuda.cuh
build/libkvprim_nccl.so: kvprim_nccl.h
build/libkvprim_cuda.so build/libkvprim_nccl.so: kvprim.h build/flags
	@echo '#include "kvprim_$(@:build/libkvprim_%.so=%).$(if $(findstring nccl,$@),h,cuh)"' >$(@:.so=.cu)
	@echo '{ global: kvprim_*; local: *; };' >$(@:.so=.map)
	$(COMPILE_CUDA) $(HOST_CFLAGS) -shared -cudart static -Xcompiler -fPIC -Xlinker --version-script=$(@:.so=.map) \
	    -DKVPRIM_IMPLEMENTATION -DKVPRIM_EXPORT $(if $(findstring nccl,$@),-I$(NCCL_INCLUDE)) $(@:.so=.cu) -o $@ \
	    $(if $(findstring nccl,$@),-Xlinker $(NCCL_LIBRARY))

build/libkvprim_host.so: kvprim.h build/flags
	$(COMPILE_C) -shared -fPIC -DKVPRIM_IMPLEMENTATION -DKVPRIM_EXPORT -x c kvprim.h -o $@

# Changes when a compiler or its flags change, so that everything is built again.
FLAGS = $(COMPILE_C) $(COMPILE_CXX) $(NVCC) $(CUDA_ARCH) $(LDFLAGS)
build/flags: FORCE
	@mkdir -p build
	@[ "$$(cat $@ 2>/dev/null)" = $(call quoted,$(FLAGS)) ] || echo $(call quoted,$(FLAGS)) >$@

build/01_rows build/18_step build/21_keys: build/%: examples/%.c $(HEADERS) build/flags
	$(COMPILE_C) $< -o $@ $(LDFLAGS)

build/02_kv_replay: examples/02_kv_replay/kv_replay.c $(HEADERS) build/flags
	$(COMPILE_C) $< -o $@ $(LDFLAGS)

build/bench_host build/bench_keys: build/%: tests/bench/%.c $(HEADERS) build/flags
	$(COMPILE_C) $< -o $@ $(LDFLAGS)

build/test_disk build/test_kvprim: build/%: tests/core/%.c $(HEADERS) build/flags
	$(COMPILE_C) $< -o $@ $(LDFLAGS)

build/test_kvprim_no_simd: tests/core/test_kvprim.c $(HEADERS) build/flags
	$(COMPILE_C) -DKVPRIM_NO_SIMD -DKVPRIM_DEBUG $< -o $@ $(LDFLAGS)

build/bench_prefix: tests/bench/bench_prefix.c build/bench_mismatch.o $(HEADERS) build/flags
	$(COMPILE_C) $< build/bench_mismatch.o -o $@ $(LDFLAGS)

build/bench_mismatch.o: tests/bench/bench_mismatch.cpp build/flags
	$(if $(CXX),,$(error make bench compares with std::mismatch and needs a C++ compiler))$(COMPILE_CXX) -c $< -o $@

clean:
	rm -rf build

.PHONY: help examples example_engine documents lib clean ncu-compare weight-compare FORCE $(RUN)

endif
