# Everything runs from a bare Python >= 3.11: the first target that needs it makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The inner loop: rules, drafts and acceptance without a model, every mode and option against the slow reference.
CHECKED := rules cache fuzz golden_traces imports bundle
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo picture check mutants test test-gpu test-extras peers test-serving versions resolve fresh heads tiny long lint walkthrough docs dist clean

# The main job in one step: the picture, in decode.svg, and the table of README.
demo: $(VENV)/.demo
	$(BIN)/mrp show --model ./hub_configs/sdar-tiny-mrp --animated --output decode.svg
	$(BIN)/mrp evaluate --model ./hub_configs/sdar-tiny-mrp --family math --count 8 --decoding sequential --decoding mrp_spec

# The picture of the README and of the embedded checkpoint's card; in float64, so that it is the same everywhere.
picture: $(VENV)/.demo
	$(BIN)/python -m mrp_trainer.cli show --animated --dtype float64 --output ./hub_configs/sdar-tiny-mrp/decode.svg

check: $(VENV)/.dev
	$(PYTEST) $(wildcard $(CHECKED:%=tests/*/test_%.py))

test: $(VENV)/.dev
	$(PYTEST) --ignore=tests/kernels/test_compiled.py

# What a machine with a GPU runs: kernels, recordings, layers and training, in ten minutes; without one, their stand-ins.
GPU_TESTS := tests/kernels tests/networks tests/train/test_objectives.py

test-gpu: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m gpu --ignore=tests/kernels/test_compiled.py $(GPU_TESTS)

# Small faults put into the engine one at a time: which tests find them, in tests/mutants.json. Half an hour on one core; ONLY=...
# tries those whose file or text it names.
mutants: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ONLY)

# What needs the other extras: quantized weights, the server, notebooks, the Space, a picture as PNG; kernels compiled for
# four GPUs; and whether what is imported from other libraries exists.
EXTRAS := quantized serve docs notebooks space picture compiled rests_on

test-extras: $(VENV)/.extras
	$(PYTEST) -rs $(wildcard $(EXTRAS:%=tests/*/test_%.py))
	$(MAKE) peers

# transformers' and PEFT's own tests, which their source distributions carry, on our model. What is expected to fail, and why, is
# in tests/peers/expected.py; what else fails is printed.
PEERS := build/peers

peers: $(VENV)/.extras $(PEERS)/.unpacked
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -o addopts=-q --tb=line -rfX tests/peers

$(PEERS)/.unpacked: constraints.txt tests/peers/unpack.py
	$(BIN)/python tests/peers/unpack.py $(PEERS) $$(grep -E '^(transformers|peft)==' constraints.txt)
	touch $@

# Of the plugin in SGLang, which runs on a CPU: an environment of its own, servers on loopback. 25 minutes on two cores.
# ENGINE=0.5.22 tests with that version in place of the newest, by TESTS="test_matrix test_texts" with some of them only.
SERVING := .venv-serving
ENGINE :=
TESTS :=

test-serving: $(SERVING)/.installed $(ENGINE:%=$(SERVING)/sglang-%)
	OMP_NUM_THREADS=1 PYTHONPATH=$(ENGINE:%=$(CURDIR)/$(SERVING)/sglang-%) $(SERVING)/bin/python -m pytest -rs \
		$(if $(TESTS),$(TESTS:%=tests/engine/%.py),tests/engine)

$(SERVING)/sglang-%: $(SERVING)/.installed
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ sglang==$*

# What users do on the lowest, the pinned and the newest versions, as a table: docs/versions.md. Environments are in the user's
# cache. ONLY=newest PYTHONS=3.12 has some of them, TORCH=2.13.0 another torch, ISOLATED=1 no local wheels or settings of pip;
# WHOLE=1 runs all tests, and transformers' and PEFT's of the same versions, in place of those of `make check`.
WHOLE :=
ONLY :=
PYTHONS :=
TORCH := own
ISOLATED :=

versions:
	$(PYTHON) tests/versions/matrix.py --only $(ONLY) --python $(PYTHONS) --torch $(TORCH) $(ISOLATED:%=--isolated) $(WHOLE:%=--whole) \
		--tests $(wildcard $(CHECKED:%=tests/*/test_%.py))

# Whether the registry alone resolves the project, its extras and constraints.txt for each Python.
resolve:
	$(PYTHON) tests/versions/resolve.py

# README's two commands in an empty home, from a clone and from a wheel, with what the registry has: minutes and megabytes.
fresh:
	$(PYTHON) tests/versions/first_run.py

# As a user does: the package from its wheel in an environment of its own, from an empty folder.
WALK := build/walkthrough

walkthrough: $(VENV)/bin/python
	rm -rf build
	mkdir -p $(WALK)/empty
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WALK) .
	$(PYTHON) -m venv $(WALK)/venv
	$(WALK)/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(echo $(WALK)/*.whl)[train,serve]" openai
	cd $(WALK)/empty && env -u PYTHONPATH ../venv/bin/python ../../../tests/walkthrough.py

# Three heads of the embedded backbone by one recipe, which differ by their seed, and what they draft: an hour and a half of a core.
MRP = OMP_NUM_THREADS=1 $(BIN)/python -m mrp_trainer.cli

heads: $(VENV)/.dev
	mkdir -p runs/heads
	$(MRP) tasks --family math --family code --count 6400 --output runs/heads/tasks.jsonl
	$(MRP) decode --model ./hub_configs/sdar-tiny-mrp --data runs/heads/tasks.jsonl --output runs/heads/decoded.jsonl \
		--max-new-tokens 64
	for seed in 1 2 3; do \
		$(MRP) train head --config tiny --seed $$seed --output-dir runs/heads/$$seed || exit 1; \
		OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.frontier --rules static dynamic sequential entropy_bound --family math code \
			--model runs/heads/$$seed --output benchmarks/results/tiny_seed_$$seed.jsonl || exit 1; \
	done

TWO = OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m

# The embedded checkpoint from its recipe, and whether it is as good. Each step goes on where it was interrupted.
TINY := runs/tiny

tiny: $(VENV)/.dev
	mkdir -p $(TINY)
	test -e $(TINY)/new/model.safetensors || $(BIN)/python -m benchmarks.tiny new $(TINY)/new
	test -e $(TINY)/math.jsonl || $(BIN)/mrp tasks --family math --count 110000 --output $(TINY)/math.jsonl
	test -e $(TINY)/code.jsonl || $(BIN)/mrp tasks --family code --count 140000 --output $(TINY)/code.jsonl
	test -e $(TINY)/source.jsonl || $(BIN)/mrp tasks --family source --count 13000 --output $(TINY)/source.jsonl
	test -e $(TINY)/backbone/model.safetensors || $(TWO) mrp_trainer.cli train backbone --config tiny-backbone
	test -e $(TINY)/tasks.jsonl || $(BIN)/mrp tasks --family math --family code --seed 1 --count 1300 --output $(TINY)/tasks.jsonl
	for target in static dynamic sequential entropy_bound; do \
		$(MRP) decode --model $(TINY)/backbone --data $(TINY)/tasks.jsonl --output $(TINY)/$$target.jsonl --target $$target \
			--max-new-tokens 80 || exit 1; \
	done
	test -e $(TINY)/head/model.safetensors || $(TWO) mrp_trainer.cli train head --config tiny-head
	$(BIN)/python -m benchmarks.tiny accept $(TINY)/head

# A small model of long texts, its head, and what it makes of texts of packages that it has never seen: hours on two cores.
# Each step goes on where it was interrupted.

long: $(VENV)/.extras
	test -e runs/long/train.npy || $(BIN)/python -m benchmarks.longtext prepare
	test -e runs/long/causal/model.safetensors || $(TWO) benchmarks.longtext causal --batch-size 2
	test -e runs/long/backbone/model.safetensors || $(TWO) mrp_trainer.cli train backbone --config packages
	test -e runs/long/head/model.safetensors || $(TWO) mrp_trainer.cli train head --config packages-head
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.longtext measure --batch-size 8
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.longtext times

# The pages of docs/ as a site, in build/site; a broken link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# A release: source distribution and wheel, in dist/; with TAG=v0.1.0 an error if the version is another.
TAG :=

dist: $(VENV)/bin/python
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build
	$(if $(TAG),test -e dist/modeling_mrp-$(TAG:v%=%)-py3-none-any.whl)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.extras: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[extras]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(SERVING)/.installed: pyproject.toml tests/engine/requirements.txt tests/engine/engine.txt \
		tests/engine/cpu_engine/mrp_cpu_engine.py
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engine/requirements.txt -e .
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/engine/engine.txt
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tests/engine/cpu_engine
	touch $@

clean:
	rm -rf $(VENV) $(SERVING) build dist *.egg-info
