"""The proof on record: `python -m flux_fast_path.bench`. See __main__.py."""
