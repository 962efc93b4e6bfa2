"""What documents and packed rows consist of, in figures and for the eye."""
