// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machinery behind every layout: one declaration gives the structure, its checked offsets, its
//! conversion from and to little-endian bytes, and a description that a test compares with the text
//! of the specification.

/// One field of a [`Layout`]: what the specification says about it, in a declaration in C and in a
/// table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldDesc {
    /// Name, as in the specification.
    pub name: &'static str,
    /// Offset from the start of the structure, bytes.
    pub offset: usize,
    /// Size, bytes.
    pub size: usize,
    /// Its type, as Rust spells it.
    pub of: &'static str,
}

/// A value with a fixed little-endian representation.
pub trait Layout: Sized {
    /// Size of the representation, bytes.
    const SIZE: usize;
    /// Writes the representation to the first [`Self::SIZE`] bytes of `out`; bytes that do not fit
    /// are dropped.
    fn put(&self, out: &mut [u8]);
    /// Reads the value from the first [`Self::SIZE`] bytes of `from`; bytes that are missing count
    /// as zero.
    fn get(from: &[u8]) -> Self;
}

macro_rules! int_layout {
    ($($t:ty),*) => {$(
        impl Layout for $t {
            const SIZE: usize = core::mem::size_of::<$t>();
            #[inline(always)]
            fn put(&self, out: &mut [u8]) {
                <[u8; core::mem::size_of::<$t>()] as Layout>::put(&self.to_le_bytes(), out)
            }
            #[inline(always)]
            fn get(from: &[u8]) -> Self {
                <$t>::from_le_bytes(Layout::get(from))
            }
        }
    )*};
}
int_layout!(u16, u32, u64);

impl Layout for u8 {
    const SIZE: usize = 1;
    #[inline(always)]
    fn put(&self, out: &mut [u8]) {
        if let Some(byte) = out.first_mut() {
            *byte = *self;
        }
    }
    #[inline(always)]
    fn get(from: &[u8]) -> Self {
        from.first().copied().unwrap_or(0)
    }
}

impl<const N: usize> Layout for [u8; N] {
    const SIZE: usize = N;
    #[inline(always)]
    fn put(&self, out: &mut [u8]) {
        match out.get_mut(..N) {
            Some(out) => out.copy_from_slice(self),
            None => {
                let n = out.len();
                if let Some(bytes) = self.get(..n) {
                    out.copy_from_slice(bytes);
                }
            }
        }
    }
    #[inline(always)]
    fn get(from: &[u8]) -> Self {
        let mut bytes = [0; N];
        match from.get(..N) {
            Some(from) => bytes.copy_from_slice(from),
            None => {
                if let Some(bytes) = bytes.get_mut(..from.len()) {
                    bytes.copy_from_slice(from);
                }
            }
        }
        bytes
    }
}

/// Declares structures with explicit offsets: `OFFSET => name: type`. The offsets are checked at
/// compile time: fields follow each other without holes or overlaps and end at the declared size.
#[macro_export]
macro_rules! layouts {
    ($(
        $(#[$doc:meta])*
        pub struct $name:ident ($size:literal) {
            $( $(#[$fdoc:meta])* $off:literal => $field:ident : $ty:ty ),* $(,)?
        }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub struct $name {
                $( $(#[$fdoc])* pub $field: $ty, )*
            }

            impl $name {
                /// Size of the representation, bytes.
                pub const SIZE: usize = $size;
                /// Name of the structure in the specification.
                pub const NAME: &'static str = stringify!($name);
                /// The fields, in order, without holes.
                pub const FIELDS: &'static [$crate::layout::FieldDesc] = &[
                    $( $crate::layout::FieldDesc {
                        name: stringify!($field),
                        offset: $off,
                        size: <$ty as $crate::layout::Layout>::SIZE,
                        of: stringify!($ty),
                    }, )*
                ];

                /// The little-endian representation.
                #[inline(always)]
                #[must_use]
                pub fn to_bytes(&self) -> [u8; $size] {
                    let mut out = [0; $size];
                    $( $crate::layout::Layout::put(&self.$field, &mut out[$off..]); )*
                    out
                }

                /// The value with this little-endian representation. Every representation is a
                /// value; whether it makes sense is for its user to check.
                #[inline(always)]
                #[must_use]
                pub fn from_bytes(from: &[u8; $size]) -> Self {
                    Self { $( $field: <$ty as $crate::layout::Layout>::get(&from[$off..]), )* }
                }
            }

            impl Default for $name {
                /// All zero.
                fn default() -> Self {
                    Self::from_bytes(&[0; $size])
                }
            }

            impl $crate::layout::Layout for $name {
                const SIZE: usize = $size;
                #[inline(always)]
                fn put(&self, out: &mut [u8]) {
                    $crate::layout::Layout::put(&self.to_bytes(), out)
                }
                #[inline(always)]
                fn get(from: &[u8]) -> Self {
                    Self::from_bytes(&$crate::layout::Layout::get(from))
                }
            }

            const _: () = {
                let fields = $name::FIELDS;
                let mut end = 0;
                let mut i = 0;
                while i < fields.len() {
                    assert!(fields[i].offset == end, concat!(stringify!($name), ": a hole or an overlap"));
                    end += fields[i].size;
                    i += 1;
                }
                assert!(end == $size, concat!(stringify!($name), ": wrong size"));
            };
        )*

        /// Every structure of this module: name, size, fields.
        pub const LAYOUTS: &[(&str, usize, &[$crate::layout::FieldDesc])] =
            &[ $( ($name::NAME, $name::SIZE, $name::FIELDS), )* ];
    };
}

/// Declares named constants and, for the test that compares them with the text, the table of them.
#[macro_export]
macro_rules! constants {
    (
        $(#[$doc:meta])*
        pub mod $module:ident : $ty:ty {
            $( $(#[$cdoc:meta])* $name:ident = $value:expr ),* $(,)?
        }
    ) => {
        $(#[$doc])*
        pub mod $module {
            $( $(#[$cdoc])* pub const $name: $ty = $value; )*

            /// Every constant of this module, by name.
            pub const ALL: &[(&str, u64)] = &[ $( (stringify!($name), $name as u64), )* ];

            /// The name of a value, where it has one.
            #[must_use]
            pub fn name(value: $ty) -> Option<&'static str> {
                ALL.iter().find(|(_, v)| *v == value as u64).map(|(n, _)| *n)
            }
        }
    };
}
