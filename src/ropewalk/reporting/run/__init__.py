"""Pages of a training run, the card beside its model, and the upload of both to the Hugging Face Hub."""
