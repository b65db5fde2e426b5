"""`tilewise tiles`: data, models and predictions of the tile-size cost model."""
