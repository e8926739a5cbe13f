"""The copy engines at length: what copies reach on a GPU, what they cost beside work, what submitting them costs."""
