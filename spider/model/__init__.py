"""The model: what spider_model.py and tile_moe.py are built of, and decoding."""
