/* What every file asks of the compiler: hidden is what does not say otherwise. */
#ifndef LIMOSA_COMPILER_H
#define LIMOSA_COMPILER_H

#define EXPORT __attribute__((visibility("default")))
#define TLS _Thread_local __attribute__((tls_model("initial-exec")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#endif
