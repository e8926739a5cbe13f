"""Remote pools."""
