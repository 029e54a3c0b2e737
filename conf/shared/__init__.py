"""The only configs that other Hydra apps see."""
