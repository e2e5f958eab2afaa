//! Gradients through every operation, against finite differences.

use super::*;
use crate::mlx::autograd::value_and_grad;
use crate::mlx::cpu_ops::{Activation, AttentionArgs, KeysValues, MatrixKind, Rotation};
use crate::mlx::fast::Mask;
use crate::mlx::{Error, Result};

/// Compares the gradients of `sum(weights * function(arguments))` with central differences at a few elements.
fn check(function: impl Fn(&[Array]) -> Result<Array> + Clone + 'static, arguments: &[Array], wrt: &[i32]) {
    let summed = {
        let function = function.clone();
        move |arguments: &[Array]| -> Result<Vec<Array>> {
            let out = function(arguments)?;
            let out = out.reshape(&[-1])?;
            Ok(vec![out.multiply(&noise(99, out.shape()))?.sum(0, false)?])
        }
    };
    let gradient = value_and_grad(summed.clone(), wrt).unwrap();
    let (values, gradients) = gradient.call(arguments).unwrap();
    assert_eq!(bits(&values[0]), bits(&summed(arguments).unwrap()[0]), "the forward pass is ours");
    for (gradient, &argument) in gradients.iter().zip(wrt) {
        let argument = argument as usize;
        assert_eq!(gradient.shape(), arguments[argument].shape());
        let found = gradient.to_f32_vec().unwrap();
        let at = arguments[argument].to_f32_vec().unwrap();
        for element in (0..at.len()).step_by(at.len().div_ceil(7)) {
            let moved = |step: f32| {
                let mut values = at.clone();
                values[element] += step;
                let mut arguments = arguments.to_vec();
                arguments[argument] = Array::from_slice(&values, arguments[argument].shape()).unwrap();
                summed(&arguments).unwrap()[0].to_f32_vec().unwrap()[0]
            };
            let step = 1e-2;
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            let slack = 4e-3 * (1.0 + difference.abs());
            assert!(
                (difference - found[element]).abs() < slack,
                "argument {argument}, element {element}: {} instead of {difference}",
                found[element]
            );
        }
    }
}

#[test]
fn of_a_dense_layer() {
    let kernels = kernels(2);
    let kind = MatrixKind::new(None, 12, 32);
    let arguments = [noise(1, &[2, 3, 32]), noise(2, &[12, 32]), noise(3, &[12])];
    check(move |a| kernels.linear(&a[0], kind, &[&a[1]], Some(&a[2])), &arguments, &[0, 1, 2]);
}

#[test]
fn of_a_packed_layer() {
    for params in [AFFINE4, QuantParams { bits: 4, group_size: 32, mode: QuantMode::Mxfp4 }] {
        let kernels = kernels(2);
        let kind = MatrixKind::new(Some(params), 16, 64);
        let weight = pack(&noise(2, &[16, 64]), params);
        let arguments = [noise(1, &[2, 3, 64]), noise(3, &[16])];
        let function = move |a: &[Array]| kernels.linear(&a[0], kind, &refs(&weight), Some(&a[1]));
        check(function, &arguments, &[0, 1]);
    }
}

/// MLX knows how packed scales and biases are trained; it is asked.
#[test]
fn of_the_scales_of_a_packed_layer() {
    let kernels = kernels(2);
    let kind = MatrixKind::new(Some(AFFINE4), 16, 64);
    let packed = pack(&noise(2, &[16, 64]), AFFINE4);
    let arguments = [noise(1, &[3, 64]), packed[1].clone(), packed[2].clone()];
    let words = packed[0].clone();
    check(move |a| kernels.linear(&a[0], kind, &[&words, &a[1], &a[2]], None), &arguments, &[0, 1, 2]);
}

#[test]
fn of_experts() {
    let ours = kernels(2);
    let indices = Array::from_slice(&[1u32, 0, 2, 1], &[2, 2]).unwrap();
    let kind = MatrixKind::stacked(None, 3, 8, 32);
    let arguments = [noise(1, &[2, 32]), noise(2, &[3, 8, 32]), noise(3, &[3, 8])];
    let chosen = indices.clone();
    check(move |a| ours.experts(&a[0], &chosen, kind, &[&a[1]], Some(&a[2])), &arguments, &[0, 1, 2]);
    let ours = kernels(2);
    let kind = MatrixKind::stacked(Some(AFFINE4), 3, 8, 32);
    let weight = pack(&noise(2, &[3, 8, 32]), AFFINE4);
    check(move |a| ours.experts(&a[0], &indices, kind, &refs(&weight), None), &arguments[..1], &[0]);
}

#[test]
fn of_norms() {
    let arguments = [noise(1, &[2, 3, 32]), noise(2, &[2, 3, 32]), noise(3, &[32]), noise(4, &[32])];
    let ours = kernels(2);
    check(move |a| ours.rms_norm(&a[0], &a[2], 1e-5), &arguments, &[0, 2]);
    let ours = kernels(2);
    check(move |a| ours.rms_norm(&a[0], &a[2].slice(0, 0, 16)?, 1e-5), &arguments, &[0, 2]);
    let ours = kernels(2);
    let both = move |a: &[Array]| {
        let (sum, normed) = ours.add_rms_norm(&a[0], &a[1], &a[2], 1e-5)?;
        sum.square()?.add(&normed)
    };
    check(both, &arguments, &[0, 1, 2]);
    let ours = kernels(2);
    check(move |a| ours.layer_norm(&a[0], Some(&a[2]), Some(&a[3]), 1e-5), &arguments, &[0, 2, 3]);
}

#[test]
fn of_rotations() {
    let freqs = Array::from_slice(&(0..8).map(|i| 1.5f32.powi(i)).collect::<Vec<_>>(), &[8]).unwrap();
    for traditional in [false, true] {
        let rotation = Rotation::from_freqs(&freqs, 1.25, traditional).unwrap();
        let (ours, turn) = (kernels(2), rotation.clone());
        check(move |a| ours.rope(&a[0], &turn, 3), &[noise(1, &[1, 2, 3, 20])], &[0]);
        let ours = kernels(2);
        check(move |a| ours.rope_tokens(&a[0], 2, &rotation, 3), &[noise(1, &[2, 3, 40])], &[0]);
    }
}

#[test]
fn of_activations() {
    let arguments = [noise(1, &[3, 20]), noise(2, &[3, 20])];
    for activation in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::GeluQuick,
        Activation::Sigmoid,
        Activation::Softcap(5.0),
    ] {
        let ours = kernels(2);
        check(move |a| ours.activate_gated(activation, &a[0], &a[1]), &arguments, &[0, 1]);
        let ours = kernels(2);
        check(move |a| ours.activate(activation, &a[0]), &arguments, &[0]);
    }
}

#[test]
fn of_attention() {
    let arguments = [
        noise(1, &[1, 4, 3, 16]),
        noise(2, &[1, 2, 7, 16]),
        noise(3, &[1, 2, 7, 16]),
        noise(4, &[3, 7]),
        noise(5, &[4]),
    ];
    let ours = kernels(2);
    let causal = move |a: &[Array]| {
        let args = AttentionArgs { scale: 0.5, mask: &Mask::Causal, sinks: None };
        ours.attention(&a[0], KeysValues::Dense(&a[1], &a[2]), &args)
    };
    check(causal, &arguments, &[0, 1, 2]);
    let ours = kernels(2);
    let masked = move |a: &[Array]| {
        let args = AttentionArgs { scale: 0.5, mask: &Mask::Array(a[3].clone()), sinks: Some(&a[4]) };
        ours.attention(&a[0], KeysValues::Dense(&a[1], &a[2]), &args)
    };
    check(masked, &arguments, &[0, 1, 2, 4]);
}

#[test]
fn of_a_dense_embedding() {
    let ours = kernels(2);
    let ids = Array::from_slice(&[1u32, 4, 1], &[3]).unwrap();
    let kind = MatrixKind::new(None, 6, 32);
    check(move |a| ours.embedding(&ids, kind, &[&a[0]]), &[noise(1, &[6, 32])], &[0]);
}

#[test]
fn what_fails_in_a_gradient_is_an_error() {
    let ours = kernels(1);
    let table = noise(1, &[6, 32]);
    let function = move |a: &[Array]| {
        let rows = ours.embedding(&a[0], MatrixKind::new(None, 6, 32), &[&table])?;
        Ok(vec![rows.reshape(&[-1])?.sum(0, false)?])
    };
    let ids = Array::from_slice(&[1u32, 9], &[2]).unwrap();
    let result = value_and_grad(function, &[0]).unwrap().call([&ids]);
    let failed = result.and_then(|(values, _)| values[0].eval());
    assert!(matches!(failed, Err(Error { .. })));
}
