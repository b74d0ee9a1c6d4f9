"""From what a loop gives to the microbatches of a step."""
