"""Classes generated from the two .proto files beside them; see the top of hlo.proto for the command."""
