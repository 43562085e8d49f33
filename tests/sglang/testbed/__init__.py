"""A real SGLang on the CPU: servers, a pair of them with kvd between, and what stands in for modules that it lacks."""
