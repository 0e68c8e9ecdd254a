"""Many runs on equal terms: plan, launch, results."""
