"""Generator `vllm`: answers from vLLM servers, which Kedge starts or is given; weights go there after each update."""
