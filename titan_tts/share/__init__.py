"""Prepared data for others: as Parquet files or audio, and on the Hugging Face hub."""
