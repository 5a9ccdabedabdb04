// A kernel's signature as words, made from its C++ types, so that both devices check a launch alike.
//
//   word of a parameter = kind | size in bytes << 8        example: const float* is 2 | 8 << 8 = 0x802
//   the list ends with a zero word
//
// Included by runtime.cuh (GPU) and cpu_runtime.h after the integer types; PK_EXPORT publishes the list.
// `pagedkv/devices/signatures.py` reads it.  A parameter of another type does not compile.
#pragma once

enum : uint32_t {
    PK_KIND_POINTER = 1,   // to something the kernel may write
    PK_KIND_CONST_POINTER, // to something the kernel only reads
    PK_KIND_SIGNED,
    PK_KIND_UNSIGNED,
    PK_KIND_FLOAT,
    PK_KIND_BOOL,
};

// Enumerators, because a static member would become a variable in the GPU's module.
template <class T> struct pk_kind;
template <class T> struct pk_kind<T*> { enum : uint32_t { value = PK_KIND_POINTER }; };
template <class T> struct pk_kind<const T*> { enum : uint32_t { value = PK_KIND_CONST_POINTER }; };
#define PK_KIND(type, kind) template <> struct pk_kind<type> { enum : uint32_t { value = kind }; };
PK_KIND(bool, PK_KIND_BOOL)
PK_KIND(char, PK_KIND_SIGNED)
PK_KIND(signed char, PK_KIND_SIGNED)
PK_KIND(unsigned char, PK_KIND_UNSIGNED)
PK_KIND(short, PK_KIND_SIGNED)
PK_KIND(unsigned short, PK_KIND_UNSIGNED)
PK_KIND(int, PK_KIND_SIGNED)
PK_KIND(unsigned int, PK_KIND_UNSIGNED)
PK_KIND(long, PK_KIND_SIGNED)
PK_KIND(unsigned long, PK_KIND_UNSIGNED)
PK_KIND(long long, PK_KIND_SIGNED)
PK_KIND(unsigned long long, PK_KIND_UNSIGNED)
PK_KIND(float, PK_KIND_FLOAT)
PK_KIND(double, PK_KIND_FLOAT)
#undef PK_KIND

// An aggregate, so that a GPU module can hold one without code that fills it.
template <class F> struct pk_signature;
template <class... A> struct pk_signature<void (*)(A...)> {
    uint32_t words[sizeof...(A) + 1] = {
        (static_cast<uint32_t>(pk_kind<A>::value) | static_cast<uint32_t>(sizeof(A)) << 8)..., 0u};
};
