"""Prepared data for others: as Parquet files or audio, with a card for the Hugging Face hub."""
