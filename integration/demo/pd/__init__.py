"""`demo pd`: prefill and decode in two vLLM servers behind vLLM's router."""
