"""One module per benchmark topic."""
