"""Storage: the PageStore contract, its tiers, and the backend class that SGLang loads."""
