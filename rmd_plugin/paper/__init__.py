"""The paper, reproduced: a leaf that nothing imports but its command."""
