"""What graphkeep costs, measured: ``python -m benchmarks.run`` runs all and writes ``docs/benchmarks/``.

Every figure is a ratio or a difference within one run; `_measure` says how time and memory are taken. Each file is one
benchmark and runs alone too: ``python -m benchmarks.heads``.
"""
