//! GGUF files (llama.cpp) as a model source.
