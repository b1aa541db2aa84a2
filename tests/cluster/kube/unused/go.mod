// Stands in for the staging modules that Kubernetes requires but no binary imports and the module proxy does not serve.
module unused

go 1.24
