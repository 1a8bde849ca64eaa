// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fabrics: what carries messages between queue pairs.
pub mod local;
pub mod registry;
