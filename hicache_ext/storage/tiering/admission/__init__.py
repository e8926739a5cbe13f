"""Which pages a tier writes at their first request, and which at their second."""
