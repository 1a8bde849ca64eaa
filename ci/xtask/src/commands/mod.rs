// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands, one module each. Each returns whether all went well.

pub mod bench;
pub mod build_root;
pub mod demo;
pub mod deny;
pub mod fuzz;
pub mod instructions;
pub mod lane;
pub mod package;
pub mod sanitize;
pub mod soak;
pub mod test;
pub mod vm;
