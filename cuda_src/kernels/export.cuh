// PK_EXPORT(kernel): publishes a kernel and its signature, so that the host finds both and checks every launch.
//
// The signature is made from the kernel's C++ types, as words, alike on both devices:
//
//   word of a parameter = kind | size in bytes << 8        example: const float* is 2 | 8 << 8 = 0x802
//   the list ends with a zero word
//
// A parameter of another type does not compile.  `pagedkv/devices/signatures.py` reads the words.
//
//   GPU   pk_signature_<kernel>   the words, as data of the module
//   cpu   pk_signature_<kernel>   a function that returns the words
//         pk_entry_<kernel>       a function that unpacks one 8-byte slot per argument and calls the kernel
#pragma once

enum : uint32_t {
    PK_KIND_POINTER = 1,   // the kernel may write through it
    PK_KIND_CONST_POINTER, // the kernel only reads through it
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

#if defined(__CUDACC__)

#define PK_EXPORT(kernel) extern "C" __device__ pk_signature<decltype(&kernel)> pk_signature_##kernel = {};

#else

template <class T>
static inline T pk_argument(const uint64_t* slot) {
    T value;
    __builtin_memcpy(&value, slot, sizeof(T));
    return value;
}

template <class... A>
struct pk_call {
    __forceinline__ pk_call(void (*kernel)(A...), A... arguments) { kernel(arguments...); }
};

// Braces, because they evaluate the arguments in order.
template <class... A>
static __forceinline__ void pk_call_with(void (*kernel)(A...), [[maybe_unused]] const uint64_t* slots) {
    pk_call<A...>{kernel, pk_argument<A>(slots++)...};
}

#define PK_EXPORT(kernel)                                                                                       \
    extern "C" __attribute__((visibility("default"), used)) void pk_entry_##kernel(const uint64_t* slots) {    \
        pk_call_with(&kernel, slots);                                                                           \
    }                                                                                                           \
    extern "C" __attribute__((visibility("default"), used)) const uint32_t* pk_signature_##kernel() {          \
        static const pk_signature<decltype(&kernel)> signature = {};                                           \
        return signature.words;                                                                                 \
    }

#endif
