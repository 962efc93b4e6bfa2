# Two commands do everything on a fresh machine: `make demo` and `make test`. Both use .venv, which they create.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
PIP_ARGS ?=
# Processes that run the tests; each takes up to 3 GB with the ranks that it starts.
WORKERS ?= 2
# Tests that `make test` runs; `make test TESTS=` runs the slow and exhaustive ones too, as CI does.
TESTS ?= not slow
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST := .venv-lowest
NEWEST := .venv-newest

.PHONY: demo test test-slow test-lowest test-newest lint wheel image format docs site benchmarks clean

demo: $(READY)
	@rm -rf demo
	@$(BIN)/ropewalk extend demo
	@echo
	@echo "Next: open demo/report.html, then point a recipe at your own model and documents:"
	@echo "      $(BIN)/ropewalk extend --help    (recipes are explained in docs/recipes.md)"

# Compiled modules are kept, whatever the environment says: each process that a test starts reads them.
test: $(READY)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(TESTS)"
	@echo "Next: 'make demo' shows the main job; 'make test-slow' runs the slow and exhaustive tests, which CI runs too;"
	@echo "      'make lint' checks style and types."

# What would keep a person waiting: long runs, training, and sweeps of which 'make test' has the representative part.
test-slow: $(READY)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

# All tests with the lowest versions that pyproject.toml allows. Python 3.11: some have no wheels for later ones.
test-lowest: $(LOWEST)/.ready
	@env -u PYTHONDONTWRITEBYTECODE $(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal

# The fast tests with the newest versions of everything, as a new user gets them; those of lists of models and kernels
# fail where transformers has added some.
test-newest: $(NEWEST)/.ready
	@env -u PYTHONDONTWRITEBYTECODE $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell --dictionary=- --dictionary=scripts/words.txt *.md docs src scripts benchmarks

# The packages as a user gets them: wheels of what is committed, in an environment without the tools of development. First
# ropewalk-core alone evaluates a server, then ropewalk is added.
wheel:
	@rm -rf build && mkdir -p build/source
	@git archive HEAD | tar -x -C build/source
	@$(PYTHON) -m venv build/venv
	@build/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/dist \
		build/source build/source/full
	@echo "Installing $$(cd build/dist && echo *) into an empty environment"
	@build/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
		--constraint constraints.txt build/dist/ropewalk_core-*.whl
	@env -u PYTHONPATH build/venv/bin/python scripts/evaluate_fake_server.py build/venv/bin/ropewalk
	@build/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) \
		--constraint constraints.txt build/dist/*.whl
	@cd build && env -u PYTHONPATH venv/bin/ropewalk extend demo --set stages.0.steps=4 --set stages.0.warmup_steps=0 \
		--set evaluation.samples=2 --set evaluation.rows=2
	@test -s build/demo/report.html && test -s build/demo/model/config.json
	@rm -rf build
	@echo "The wheels install, evaluate a server and run a short demo without the tools of development."

# The image of the Dockerfile, and a short demo in it, without a GPU.
image:
	@docker build --tag ropewalk .
	@docker run --rm ropewalk extend demo --set stages.0.steps=4 --set stages.0.warmup_steps=0 \
		--set evaluation.samples=2 --set evaluation.rows=2
	@echo "The image ropewalk runs a short demo."

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

benchmarks: $(READY)
	@$(BIN)/python -m benchmarks.attention_cpu
	@$(BIN)/python -m benchmarks.training_memory
	@$(BIN)/python -m benchmarks.parallel_cpu

# What is made of code in docs/, and then the site; the page to open is build/site/index.html.
docs: $(READY)
	@$(BIN)/python scripts/readers_page.py
	@$(BIN)/python scripts/recipe_reference.py
	@$(BIN)/python scripts/shipped_recipes.py
	@$(BIN)/python scripts/supported_models.py --page
	@$(BIN)/python -m scripts.cli_reference
	@$(BIN)/python scripts/file_reference.py
	@$(BIN)/python scripts/job_keywords.py
	@$(BIN)/python scripts/draw_pictures.py
	@$(BIN)/python scripts/build_site.py

# The site alone, from docs/ as it is: every link, picture and the search are checked, and that nothing is loaded from elsewhere.
site: $(READY)
	@$(BIN)/python scripts/build_site.py

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) build demo .cache

# Modules are compiled when they are first imported: most of what these packages hold never is.
$(READY): pyproject.toml full/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ropewalk needs Python 3.11 or later; this is %d.%d (set PYTHON=...)" % sys.version_info[:2])'
	@echo "Setting up $(VENV): torch, transformers and what they need (some minutes on the first run)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) --constraint constraints.txt \
		--editable . './full[dev,docs]' | awk '/^(Collecting|Installing|Successfully)/ {print substr($$0, 1, 100); fflush()}'
	@touch $@

$(LOWEST)/.ready: pyproject.toml full/pyproject.toml constraints-lowest.txt
	@echo "Setting up $(LOWEST): the lowest versions that pyproject.toml allows (some minutes on the first run)"
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint constraints-lowest.txt --editable . './full[dev]'
	@touch $@

$(NEWEST)/.ready: pyproject.toml full/pyproject.toml
	@echo "Setting up $(NEWEST): the newest versions (some minutes on the first run)"
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable . './full[dev]'
	@touch $@
