# make demo and make test need nothing before them but Python (3.10 or newer), make and a C compiler.
# PY=... uses another Python, with everything installed, instead of making .venv.

ifneq ($(realpath $(firstword $(MAKEFILE_LIST))),$(realpath Makefile))
$(error make is run in the folder of this Makefile: it starts what lies there)
endif

# Of variables that have a Python or a shell load more only folders of one's own come through (scripts/own-folders).
ifneq ($(origin PYTHONPATH), undefined)
export PYTHONPATH := $(shell scripts/own-folders "$$PYTHONPATH")
endif
unexport PYTHONHOME PYTHONSTARTUP PYTHONINSPECT PYTHONUSERBASE BASH_ENV ENV

ifeq ($(origin PY), undefined)
PY := .venv/bin/python
READY_DEMO = scripts/bootstrap demo
READY_TEST = scripts/bootstrap test
endif

# CRIU needs root. Whoever is not root uses sudo where it can be had, for what needs CRIU and nothing else.
SUDO := $(shell [ "$$(id -u)" = 0 ] || { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; } && echo sudo -E env PATH="$$PATH" PYTHONDONTWRITEBYTECODE=1; })

PYTEST = $(PY) -m pytest

.PHONY: demo test test-share test-all test-criu test-soft test-long test-zdtm test-gpu faults fuzz mutants bench bench-driver bench-gpu lint check man wheel clean help

help:
	@echo "make demo       a job, disturbed and undisturbed: both end with the same bits (no GPU needed)"
	@echo "make test       what CI runs: lint and the tests that need no GPU, of those that take long a quarter of the variants"
	@echo "make test-all   all of them"
	@echo "make check      of these, the fast ones: two minutes"
	@echo "make test-criu  those that need CRIU; make test-soft: those on software GPUs, the fault campaign among them"
	@echo "make test-long  every kill of the parked way, 90 of them (make test has 27), and of containers: ten minutes"
	@echo "make test-zdtm  CRIU's own tests through limosa beside bare CRIU, its source from Debian; half an hour"
	@echo "make test-gpu   tests on the GPUs of this machine"
	@echo "make faults     the fault campaign on software GPUs; CASE=… SEED=… replays one run, N=… takes so many"
	@echo "make fuzz       hostile input at every border, 100,000 cases each; N=…, SEED=… as well"
	@echo "make mutants    mistakes made on purpose, one at a time, in a copy: does a test notice? ONLY=… one of them"
	@echo "make man        man pages; make wheel: dist/*.whl, for systems with a C library from 2.17 on"
	@echo "make bench      what Limosa adds to bare CRIU; make bench-driver: to the bare driver"
	@echo "make bench-gpu  the parked way on two GPUs, every figure that is promised; ROWS=nccl: of jobs of several ranks; ROWS=containers"

demo:
	@$(READY_DEMO)
	@$(SUDO) $(PY) -I -m limosa demo
	@echo "limosa is $(dir $(PY))limosa"

# Of tests that take long a quarter of the variants, others at each commit: four in a row run all (tests/shares.py).
COMMITS = $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
test: lint check test-share
test-share:
	@$(MAKE) LIMOSA_SHARE=$$(( $(COMMITS) % 4 + 1 ))/4 test-criu test-soft

test-all: lint check test-criu test-soft

# Four for two cores: a test waits for its processes half of its time. Who is done early takes over from who is not.
SIDE_BY_SIDE = -n 4 --dist worksteal
# What a run has nothing of is not even read.
NODES = --ignore=tests/campaign --ignore=tests/conformance --ignore=tests/containers --ignore=tests/e2e_soft --ignore=tests/gpu --ignore=tests/softgpu

# The fast ones: an answer in a minute or two.
check:
	@$(READY_TEST)
	$(PYTEST) -q $(SIDE_BY_SIDE) $(NODES) -m "not (gpu or criu or root or slow or network or conformance)"

# Those that need CRIU or take long, each process in a network of its own; the driver's answers and what fetches packages,
# always whole: they take two minutes.
test-criu:
	@$(READY_TEST)
	if $(SUDO) unshare -n true 2>/dev/null; then side_by_side="$(SIDE_BY_SIDE)"; fi; \
	$(SUDO) env LIMOSA_TEST_NETWORKS=1 $(PYTEST) -q $$side_by_side $(NODES) --durations=10 -m "(criu or slow) and not (root or gpu or network or conformance)"
	$(SUDO) env LIMOSA_SHARE= $(PYTEST) -q -n 4 --dist loadgroup -m "conformance and not gpu" tests/conformance
	$(SUDO) env LIMOSA_SHARE= $(PYTEST) -q -n 4 --dist loadfile -m "network and not gpu" $(NODES)

# Nodes of software GPUs: their own tests, the command line on them, containers on them (what those are made of is fetched
# once, into build/engines), the fault campaign (nine minutes).
test-soft:
	@$(READY_TEST)
	$(SUDO) $(PYTEST) -q $(SIDE_BY_SIDE) --ignore=tests/conformance --ignore=tests/gpu --durations=10 -m "root and not (gpu or conformance)"

# SIGKILL of whoever has a part in a parked operation, at every step that it journals.
test-long:
	@$(READY_TEST)
	$(SUDO) env LIMOSA_LONG_TESTS=1 $(PYTEST) -q -n 2 --durations=10 -k killed tests/e2e_soft tests/containers

# CRIU's own tests, both ways. ARGS="--count 40 --seed 2", ARGS=socket-tcp, ARGS="--json FILE --page FILE".
test-zdtm:
	@$(READY_TEST)
	cd tests && $(SUDO) $(abspath $(PY)) -m zdtm $(ARGS)

# What clang-tidy reads, as .clang-tidy says.
TIDY = $(addprefix src/limosa/native/,cdi criu hash shim sight) src/limosa_softgpu/native

lint:
	@$(READY_TEST)
	$(PY) -I -m ruff check .
	$(PY) -I -m ruff format --check .
	$(dir $(PY))clang-format --dry-run -Werror $$(find src tests bench -name '*.[ch]')
	find $(TIDY) -name '*.c' -print0 | xargs -0 -n 1 -P 2 sh -c '"$$0" --quiet "$$1" --' $(dir $(PY))clang-tidy
	$(PY) -I -m mypy
	$(PY) -I -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())'

test-gpu:
	@$(READY_TEST)
	$(SUDO) env PY="$(PY)" scripts/test-gpu.sh

# WAY=parked: the campaign of jobs under the shim; WAY=ranks: of jobs of several ranks; WAY=containers: of containers. Without N every (operation, step, fault) once, N=all every class of victim with each; RECORD=1 notes the steps anew.
# In parts: LIMIT=seconds SUMMARY=1.json, then SUMMARY=2.json WITHOUT=1.json, then MERGE="1.json 2.json" SUMMARY=all.json.
faults:
	@$(READY_TEST)
	$(SUDO) env PYTHONPATH="$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m campaign $(if $(WAY),--way $(WAY)) $(if $(RECORD),--record) $(if $(CASE),--case $(CASE)) \
		--seed $(or $(SEED),1) $(if $(N),--count $(N)) $(if $(SUMMARY),--summary $(SUMMARY)) \
		$(if $(ROOMS),--rooms $(ROOMS)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(WITHOUT),--without $(WITHOUT)) \
		$(if $(MERGE),--merge $(MERGE))

# What comes from strangers: runtime files, the shim's replies, packets, manifests, command lines (tests/fuzz).
fuzz:
	@$(READY_TEST)
	$(SUDO) env LIMOSA_FUZZ=$(or $(N),100000) $(if $(SEED),LIMOSA_FUZZ_SEED=$(SEED)) $(PYTEST) -q -n 2 --durations=10 tests/fuzz

# Never in the checkout. SIDE=2: two copies side by side; TABLE=FILE: the result as a page.
mutants:
	@$(READY_TEST)
	$(SUDO) env PYTHONPATH="$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m mutants $(if $(ONLY),--only $(ONLY)) $(if $(SIDE),--side $(SIDE)) $(if $(TABLE),--table $(TABLE))

bench:
	@$(READY_TEST)
	$(SUDO) $(PY) bench/host.py

bench-driver:
	@$(READY_TEST)
	$(SUDO) $(PY) bench/driver.py

bench-gpu:
	@$(READY_TEST)
	$(SUDO) $(PY) bench/gpu.py $(if $(ROWS),--rows $(ROWS))

# Man pages of every verb; a wheel has them in share/man/man1 where they have been made.
man:
	@$(READY_DEMO)
	$(PY) -I scripts/man.py build/man

# A wheel for other machines: fails where it would need a C library newer than 2.17, or where anything is not built.
wheel: man
	LIMOSA_RELEASE=1 $(PY) -I -m pip wheel -q --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache dist build
