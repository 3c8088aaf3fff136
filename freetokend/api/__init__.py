"""Generated protobuf and gRPC stubs; the build writes them, nobody edits them."""
