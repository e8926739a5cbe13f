"""The only room that imports SGLang: the backend it loads, its pools, launch facts, hooks, the plug-in."""
