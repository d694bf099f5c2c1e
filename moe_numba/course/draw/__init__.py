"""Teaching pictures, drawn from parameters or simulator traces: one module per topic."""
