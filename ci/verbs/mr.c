// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Memory regions: null, zero based, with addresses of one's own, changed, imported; device memory.
 */
#include "verbs-test.h"

#include <pthread.h>
#include <sys/mman.h>

/* Null regions: reading gives zeros, what is written vanishes. */

TEST(null_mr_send_and_receive)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 65536);
	struct ibv_mr *null = MAKE_IF_SUPPORTED(ibv_alloc_null_mr(p.pd[0]));
	struct ibv_mr *null1 = MAKE(ibv_alloc_null_mr(p.pd[1]));
	struct ibv_sge list[3] = { sge(&p.mr[0], 0, 100), { 0x7000, 200, null->lkey }, sge(&p.mr[0], 100, 50) };
	struct ibv_sge into[3] = { sge(&p.mr[1], 8192, 10), { 0, 80, null1->lkey }, sge(&p.mr[1], 12288, 4096) };
	struct ibv_recv_wr *bad, wr = { .wr_id = 2, .sg_list = into, .num_sge = 3 };

	fill(p.mr[0].p, 4096, 1);
	memset(p.mr[1].p, 0x55, 65536);
	RECV(p.qp[1], 1, &p.mr[1], 0, 4096);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .list = list, .num_sge = 3);
	expect_ok(p.cq[0], 1, SEND);
	EQ(expect_ok(p.cq[1], 1, RECV).byte_len, 350);
	CHECK(memcmp(p.mr[1].p, p.mr[0].p, 100) == 0);
	CHECK(all_bytes(p.mr[1].p + 100, 200, 0));
	CHECK(memcmp(p.mr[1].p + 300, p.mr[0].p + 100, 50) == 0);
	CHECK(all_bytes(p.mr[1].p + 350, 1000, 0x55));

	OK(ibv_post_recv(p.qp[1], &wr, &bad));
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 200);
	expect_ok(p.cq[0], 2, SEND);
	EQ(expect_ok(p.cq[1], 2, RECV).byte_len, 200);
	CHECK(memcmp(p.mr[1].p + 8192, p.mr[0].p, 10) == 0);
	CHECK(all_bytes(p.mr[1].p + 8202, 1000, 0x55));
	CHECK(memcmp(p.mr[1].p + 12288, p.mr[0].p + 90, 110) == 0);
	CHECK(all_bytes(p.mr[1].p + 12398, 1000, 0x55));
	OK(ibv_dereg_mr(null));
	OK(ibv_dereg_mr(null1));
}

TEST(null_mr_rdma)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 1 << 20);
	struct ibv_mr *null = MAKE_IF_SUPPORTED(ibv_alloc_null_mr(p.pd[0]));
	/* Any address, as long as can be: the region is all of it. */
	struct ibv_sge all = { 0xffff00000000, 1 << 20, null->lkey }, eight = { 8, 8, null->lkey };

	memset(p.mr[1].p, 0xff, 1 << 20);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &all, .num_sge = 1, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(all_bytes(p.mr[1].p, 1 << 20, 0));
	fill(p.mr[1].p, 1 << 20, 2);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .list = &all, .num_sge = 1, .to = &p.mr[1]);
	EQ(expect_ok(p.cq[0], 2, RDMA_READ).byte_len, 1 << 20);
	*(uint64_t *)p.mr[1].p = 5;
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 3, .list = &eight, .num_sge = 1, .to = &p.mr[1],
	     .compare_add = 3);
	expect_ok(p.cq[0], 3, FETCH_ADD);
	EQ(*(uint64_t *)p.mr[1].p, 8);
	/* What vanished did not go anywhere: it is read as zero still. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 4, .list = &all, .num_sge = 1, .to = &p.mr[1]);
	expect_ok(p.cq[0], 4, RDMA_WRITE);
	CHECK(all_bytes(p.mr[1].p, 1 << 20, 0));
}

/* It is for local use only. */
TEST(null_mr_is_not_remote)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_mr *null = MAKE_IF_SUPPORTED(ibv_alloc_null_mr(p.pd[1]));

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .addr = 0, .rkey = null->lkey);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
}

/* Addresses. */

TEST(mr_zero_based)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(16384) + 100;
	struct ibv_mr *mr = MAKE(ibv_reg_mr(p.pd[1], memory, 10000, ALL | IBV_ACCESS_ZERO_BASED));
	struct ibv_sge local = { 200, 300, mr->lkey };

	fill(p.mr[0].p, 4096, 3);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 4096, .addr = 0, .rkey = mr->rkey);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(memory, 4096, 3));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 1, .addr = 9999, .rkey = mr->rkey);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
	EQ(memory[9999], p.mr[0].p[0]);
	EQ(memory[10000], 0);
	/* Locally, too. */
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .list = &local, .num_sge = 1, .to = &p.mr[0], .to_offset = 8192);
	expect_ok(p.cq[1], 3, RDMA_WRITE);
	CHECK(memcmp(p.mr[0].p + 8192, memory + 200, 300) == 0);
	/* One byte behind the end. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 4, .from = &p.mr[0], .length = 2, .addr = 9999, .rkey = mr->rkey);
	expect_error(p.cq[0], 4, REM_ACCESS_ERR);
}

TEST(mr_iova)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(16384);
	/* An address that is nobody's, with the same offset in its page. */
	uint64_t iova = 0x123456789000 + 100;
	struct ibv_mr *mr = MAKE(ibv_reg_mr_iova(p.pd[1], memory + 100, 10000, iova, ALL));
	struct ibv_sge local = { iova + 200, 300, mr->lkey };

	fill(p.mr[0].p, 4096, 4);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 4096, .addr = iova, .rkey = mr->rkey);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(memory + 100, 4096, 4));
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .list = &local, .num_sge = 1, .to = &p.mr[0], .to_offset = 8192);
	expect_ok(p.cq[1], 2, RDMA_WRITE);
	CHECK(memcmp(p.mr[0].p + 8192, memory + 300, 300) == 0);
	/* Its own address is not valid. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .length = 8, .addr = (uintptr_t)memory + 100,
	     .rkey = mr->rkey);
	expect_error(p.cq[0], 3, REM_ACCESS_ERR);
	/* Regions that would end behind the last address. */
	MAKE_FAILS(EINVAL, ibv_reg_mr_iova(p.pd[1], memory, 8192, 0xfffffffffffff000, ALL));
}

TEST(mr_unaligned)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(1 << 20);

	fill(p.mr[0].p, 8192, 5);
	for (unsigned int i = 0; i < 20; i++) {
		size_t at = i * 4099 + 1, length = i * 97 + 1;
		struct ibv_mr *mr = MAKE(ibv_reg_mr(p.pd[1], memory + at, length, ALL));

		memset(memory, 0, 1 << 20);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = length, .addr = (uintptr_t)memory + at,
		     .rkey = mr->rkey);
		expect_ok(p.cq[0], i, RDMA_WRITE);
		CHECK(filled(memory + at, length, 5));
		EQ(memory[at - 1], 0);
		EQ(memory[at + length], 0);
		OK(ibv_dereg_mr(mr));
	}
}

/* Memory that the process may only read can be sent from, and not written to (G-SEC-002). */
TEST(mr_of_read_only_memory)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(8192);
	struct ibv_mr *mr;

	fill(memory, 8192, 6);
	CHECK(mprotect(memory, 8192, PROT_READ) == 0);
	MAKE_FAILS(EFAULT, ibv_reg_mr(p.pd[0], memory, 8192, LOCAL));
	mr = MAKE(ibv_reg_mr(p.pd[0], memory, 8192, IBV_ACCESS_REMOTE_READ));
	struct ibv_sge list = { (uintptr_t)memory, 8192, mr->lkey };
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &list, .num_sge = 1, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 8192, 6));
	memset(p.mr[1].p, 0, 8192);
	POST(p.qp[1], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[1], .length = 8192, .addr = (uintptr_t)memory,
	     .rkey = mr->rkey);
	expect_ok(p.cq[1], 2, RDMA_READ);
	CHECK(filled(p.mr[1].p, 8192, 6));
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[1], .length = 8, .addr = (uintptr_t)memory,
	     .rkey = mr->rkey);
	expect_error(p.cq[1], 3, REM_ACCESS_ERR);
}

TEST(mr_bad_parameters)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	uint8_t *memory = pages(8192);

	MAKE_FAILS(EINVAL, ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_REMOTE_WRITE));
	MAKE_FAILS(EINVAL, ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_REMOTE_ATOMIC));
	MAKE_FAILS(EFAULT, ibv_reg_mr(pd, (void *)0x10000, 4096, ALL));
	CHECK(munmap(memory + 4096, 4096) == 0);
	MAKE_FAILS(EFAULT, ibv_reg_mr(pd, memory, 8192, ALL));
	MAKE_FAILS(EOPNOTSUPP, ibv_reg_mr(pd, memory, 4096, ALL | IBV_ACCESS_ON_DEMAND));
	/* A domain with a region in it stays. */
	struct ibv_mr *mr = MAKE(ibv_reg_mr(pd, memory, 4096, ALL | IBV_ACCESS_RELAXED_ORDERING));
	FAILS(EBUSY, ibv_dealloc_pd(pd));
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(pd));
}

/* Keys of a region that is gone are not those of the next. */
TEST(mr_key_after_dereg)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(4096);

	for (int i = 0; i < 20; i++) {
		struct ibv_mr *mr = MAKE(ibv_reg_mr(p.pd[1], memory, 4096, ALL)), *next;
		uint32_t rkey = mr->rkey;

		OK(ibv_dereg_mr(mr));
		next = MAKE(ibv_reg_mr(p.pd[1], memory, 4096, ALL));
		CHECK(next->rkey != rkey);
		OK(ibv_dereg_mr(next));
		if (i < 19)
			continue;
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .addr = (uintptr_t)memory,
		     .rkey = rkey);
		expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	}
}

/* Changing a region. */

TEST(rereg_mr_access)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct conn usual = conn(0);
	struct ibv_mr *mr = p.mr[1].mr;

	EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, LOCAL | IBV_ACCESS_REMOTE_READ), 0);
	fill(p.mr[1].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_READ);
	CHECK(filled(p.mr[0].p, 100, 1));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 100, .to = &p.mr[1], .to_offset = 512);
	expect_error(p.cq[0], 2, REM_ACCESS_ERR);
	CHECK(all_bytes(p.mr[1].p + 512, 100, 0));
	wait_event(QP_ACCESS_ERR);
	EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL), 0);
	for (int i = 0; i < 2; i++)
		set_state(p.qp[i], IBV_QPS_RESET);
	connect_pair(&p, &usual);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .length = 100, .to = &p.mr[1], .to_offset = 512);
	expect_ok(p.cq[0], 3, RDMA_WRITE);
	CHECK(filled(p.mr[1].p + 512, 100, 1));
}

TEST(rereg_mr_translation)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory[2] = { p.mr[1].p, pages(65536) };
	size_t length[2] = { 16384, 65536 };

	for (unsigned int i = 1; i < 12; i++) {
		uint8_t *now = memory[i & 1], *before = memory[!(i & 1)];

		EQ(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, now, length[i & 1], 0), 0);
		EQ(p.mr[1].mr->length, length[i & 1]);
		CHECK(p.mr[1].mr->addr == now);
		fill(p.mr[0].p, 5000, i);
		memset(before, 0x33, 5000);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 5000, .addr = (uintptr_t)now,
		     .rkey = p.mr[1].mr->rkey);
		expect_ok(p.cq[0], i, RDMA_WRITE);
		CHECK(filled(now, 5000, i));
		CHECK(all_bytes(before, 5000, 0x33));
	}
	/* The old address is no longer the region's. */
	EQ(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory[0], 4096, 0), 0);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 99, .from = &p.mr[0], .length = 8, .addr = (uintptr_t)memory[1],
	     .rkey = p.mr[1].mr->rkey);
	expect_error(p.cq[0], 99, REM_ACCESS_ERR);
}

TEST(rereg_mr_pd)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	EQ(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_PD, p.pd[0], NULL, 0, 0), 0);
	CHECK(p.mr[1].mr->pd == p.pd[0]);
	/* Now it is of the other's domain. */
	struct ibv_sge list = sge(&p.mr[1], 0, 100);
	fill(p.mr[1].p, 100, 7);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &list, .num_sge = 1, .to = &p.mr[0]);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	OK(ibv_destroy_qp(p.qp[1]));
	/* Nothing but the queue pair kept the domain. */
	OK(ibv_dealloc_pd(p.pd[1]));
}

/* All at once, and what cannot be leaves the region as it was. */
TEST(rereg_mr_all_and_errors)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	uint8_t *memory = pages(8192);
	int all = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;

	CHECK(ibv_rereg_mr(p.mr[1].mr, 0x100, NULL, NULL, 0, 0) != 0);
	CHECK(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 0, 0) != 0);
	CHECK(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) != 0);
	CHECK(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)0x10000, 4096, 0) != 0);
	fill(p.mr[0].p, 1000, 8);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 1000, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 1000, 8));
	/* The region of the first domain becomes one of the second, elsewhere, read only. */
	struct ibv_mr *mr = p.mr[0].mr;
	EQ(ibv_rereg_mr(mr, all, p.pd[1], memory, 8192, LOCAL | IBV_ACCESS_REMOTE_READ), 0);
	struct region other = region(p.pd[0], 4096, ALL);
	fill(memory, 1000, 9);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &other, .length = 1000, .addr = (uintptr_t)memory,
	     .rkey = mr->rkey);
	expect_ok(p.cq[0], 2, RDMA_READ);
	CHECK(filled(other.p, 1000, 9));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &other, .length = 1000, .addr = (uintptr_t)memory,
	     .rkey = mr->rkey);
	expect_error(p.cq[0], 3, REM_ACCESS_ERR);
}

/*
 * Changed while messages are under way: each is done with the region as it was or fails, and when
 * the call has returned, the old memory is left alone.
 */
LONG_TEST(rereg_mr_under_traffic, 120)
{
	const size_t size = 4 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = size);
	uint8_t *memory[2] = { p.mr[1].p, pages(size) };
	struct conn usual = conn(0);
	unsigned int failed = 0, done = 0;

	for (unsigned int i = 1; i <= 30; i++) {
		uint8_t *before = memory[!(i & 1)], *now = memory[i & 1];
		struct ibv_wc wc;

		memset(p.mr[0].p, i, size);
		for (int j = 0; j < 3; j++)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = j, .from = &p.mr[0], .length = size,
			     .addr = (uintptr_t)before, .rkey = p.mr[1].mr->rkey);
		EQ(ibv_rereg_mr(p.mr[1].mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, now, size, 0), 0);
		memset(before, 0xdd, size);
		for (int j = 0; j < 3; j++) {
			wc = wait_wc(p.cq[0]);
			if (wc.status == IBV_WC_SUCCESS)
				done++;
			else if (wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_WR_FLUSH_ERR)
				failed++;
			else
				fail("status %s", ibv_wc_status_str(wc.status));
		}
		CHECK(all_bytes(before, size, 0xdd));
		for (int j = 0; j < 2; j++)
			set_state(p.qp[j], IBV_QPS_RESET);
		connect_pair(&p, &usual);
	}
	EQ(failed + done, 90);
}

/* The same with deregistration. */
LONG_TEST(dereg_mr_under_traffic, 120)
{
	const size_t size = 4 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = size);
	uint8_t *memory = pages(size);
	struct conn usual = conn(0);

	for (unsigned int i = 1; i <= 20; i++) {
		struct ibv_mr *mr = MAKE(ibv_reg_mr(p.pd[1], memory, size, ALL));

		memset(p.mr[0].p, i, size);
		for (int j = 0; j < 3; j++)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = j, .from = &p.mr[0], .length = size,
			     .addr = (uintptr_t)memory, .rkey = mr->rkey);
		OK(ibv_dereg_mr(mr));
		memset(memory, 0xdd, size);
		for (int j = 0; j < 3; j++) {
			struct ibv_wc wc = wait_wc(p.cq[0]);

			CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR ||
			      wc.status == IBV_WC_WR_FLUSH_ERR);
		}
		CHECK(all_bytes(memory, size, 0xdd));
		for (int j = 0; j < 2; j++)
			set_state(p.qp[j], IBV_QPS_RESET);
		connect_pair(&p, &usual);
	}
}

/* Device memory. */

static struct ibv_dm *make_dm(size_t length)
{
	struct ibv_alloc_dm_attr attr = { .length = length };

	if (!dev.max_dm_size)
		skip("the device has no device memory");
	return MAKE(ibv_alloc_dm(ctx, &attr));
}

TEST(dm_copy)
{
	struct ibv_dm *dm = make_dm(10000);
	uint8_t out[10000], in[10000] = { 0 };

	fill(out, sizeof(out), 1);
	OK(ibv_memcpy_to_dm(dm, 0, out, 10000));
	OK(ibv_memcpy_from_dm(in, dm, 0, 10000));
	CHECK(filled(in, 10000, 1));
	OK(ibv_memcpy_to_dm(dm, 9992, out, 8));
	OK(ibv_memcpy_from_dm(in, dm, 5000, 5000));
	CHECK(memcmp(in, out + 5000, 4992) == 0 && memcmp(in + 4992, out, 8) == 0);
	CHECK(ibv_memcpy_to_dm(dm, 9996, out, 8) != 0);
	CHECK(ibv_memcpy_from_dm(in, dm, 10000, 4) != 0);
	CHECK(ibv_memcpy_from_dm(in, dm, UINT64_MAX - 3, 4) != 0);
	OK(ibv_free_dm(dm));
}

TEST(dm_rdma_and_atomics)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_dm *dm = make_dm(12288);
	struct ibv_mr *mr = MAKE(ibv_reg_dm_mr(p.pd[1], dm, 1000, 8192, ALL | IBV_ACCESS_ZERO_BASED));
	uint8_t got[8192];
	uint64_t word = 40;

	fill(p.mr[0].p, 8192, 2);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8192, .addr = 0, .rkey = mr->rkey);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	OK(ibv_memcpy_from_dm(got, dm, 1000, 8192));
	CHECK(filled(got, 8192, 2));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .offset = 8192, .length = 100, .addr = 8092,
	     .rkey = mr->rkey);
	expect_ok(p.cq[0], 2, RDMA_READ);
	CHECK(memcmp(p.mr[0].p + 8192, p.mr[0].p + 8092, 100) == 0);
	OK(ibv_memcpy_to_dm(dm, 1000, &word, 8));
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 3, .from = &p.mr[0], .length = 8, .addr = 0, .rkey = mr->rkey,
	     .compare_add = 2);
	expect_ok(p.cq[0], 3, FETCH_ADD);
	EQ(*(uint64_t *)p.mr[0].p, 40);
	OK(ibv_memcpy_from_dm(&word, dm, 1000, 8));
	EQ(word, 42);
	/* As a receive buffer, and to send from. */
	struct ibv_sge local = { 64, 64, mr->lkey };
	struct ibv_recv_wr *bad, wr = { .wr_id = 4, .sg_list = &local, .num_sge = 1 };
	OK(ibv_post_recv(p.qp[1], &wr, &bad));
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 4, .from = &p.mr[0], .offset = 300, .length = 64);
	expect_ok(p.cq[0], 4, SEND);
	expect_ok(p.cq[1], 4, RECV);
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 5, .list = &local, .num_sge = 1, .to = &p.mr[0], .to_offset = 12288);
	expect_ok(p.cq[1], 5, RDMA_WRITE);
	CHECK(memcmp(p.mr[0].p + 300, p.mr[0].p + 12288, 64) == 0);
	/* Behind the end of the region, though not of the memory. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 6, .from = &p.mr[0], .length = 8, .addr = 8185, .rkey = mr->rkey);
	expect_error(p.cq[0], 6, REM_ACCESS_ERR);
	/* Memory in use stays. */
	FAILS(EBUSY, ibv_free_dm(dm));
	OK(ibv_dereg_mr(mr));
	OK(ibv_free_dm(dm));
}

TEST(dm_bad_parameters)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_dm *dm = make_dm(4096);
	struct ibv_alloc_dm_attr attr = { .length = dev.max_dm_size + 1 };

	CHECK(!ibv_alloc_dm(ctx, &attr));
	attr = (struct ibv_alloc_dm_attr){ .length = 0 };
	MAKE_FAILS(EINVAL, ibv_alloc_dm(ctx, &attr));
	/* Zero based is the only way. */
	MAKE_FAILS(EINVAL, ibv_reg_dm_mr(pd, dm, 0, 4096, ALL));
	MAKE_FAILS(EINVAL, ibv_reg_dm_mr(pd, dm, 1, 4096, ALL | IBV_ACCESS_ZERO_BASED));
	MAKE_FAILS(EINVAL, ibv_reg_dm_mr(pd, dm, 8192, 8, ALL | IBV_ACCESS_ZERO_BASED));
}

/* It comes zeroed, whoever had it before, and all of it can be had again. */
TEST(dm_is_clean_and_comes_back)
{
	uint8_t *data = pages(65536);

	for (int round = 0; round < 5; round++) {
		struct ibv_dm *held[1024];
		int n = 0;

		while (n < 1024) {
			struct ibv_alloc_dm_attr attr = { .length = 65536 };

			held[n] = ibv_alloc_dm(ctx, &attr);
			if (!held[n]) {
				CHECK(errno == ENOMEM || errno == ENOSPC);
				break;
			}
			OK(ibv_memcpy_from_dm(data, held[n], 0, 65536));
			CHECK(all_bytes(data, 65536, 0));
			memset(data, 0x77, 65536);
			OK(ibv_memcpy_to_dm(held[n], 0, data, 65536));
			n++;
		}
		if (n == 0 && !dev.max_dm_size)
			skip("the device has no device memory");
		CHECK((uint64_t)n * 65536 <= dev.max_dm_size && n > 0);
		while (n)
			OK(ibv_free_dm(held[--n]));
	}
}

/* Objects of another process, by its command file. */

struct handles {
	uint32_t pd, mr, dm;
	uint64_t addr;
	uint32_t rkey, lkey;
};

static void importer(struct link *link)
{
	struct handles handles;
	int fd = get_fd(link);
	struct ibv_context *imported = MAKE(ibv_import_device(fd));
	struct ibv_pd *pd;
	struct ibv_mr *mr, *own;
	uint8_t *memory = pages(4096), data[64];

	get(link, &handles, sizeof(handles));
	pd = MAKE(ibv_import_pd(imported, handles.pd));
	mr = MAKE(ibv_import_mr(pd, handles.mr));
	EQ(mr->rkey, handles.rkey);
	EQ(mr->lkey, handles.lkey);
	EQ(mr->length, 16384);
	if (handles.dm) {
		struct ibv_dm *dm = MAKE(ibv_import_dm(imported, handles.dm));

		OK(ibv_memcpy_from_dm(data, dm, 0, 64));
		CHECK(filled(data, 64, 4));
		fill(data, 64, 5);
		OK(ibv_memcpy_to_dm(dm, 0, data, 64));
		ibv_unimport_dm(dm);
	}
	/* A region of ours in the other's protection domain. */
	own = MAKE(ibv_reg_mr(pd, memory, 4096, ALL));
	handles.addr = (uintptr_t)memory;
	handles.rkey = own->rkey;
	put(link, &handles, sizeof(handles));
	meet(link);
	CHECK(filled(memory, 1000, 6));
	/* Queues of ours on it. */
	struct ibv_cq *cq = MAKE(ibv_create_cq(imported, 16, NULL, NULL, 0));
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = MAKE(ibv_create_qp(pd, &attr));
	struct conn to = conn(qp->qp_num);
	connect_qp(qp, &to);
	struct ibv_sge list = { (uintptr_t)memory, 8, own->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 9, .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					.send_flags = IBV_SEND_SIGNALED,
					.wr.rdma = { (uintptr_t)memory + 2048, own->rkey } };
	OK(ibv_post_send(qp, &wr, &bad));
	expect_ok(cq, 9, RDMA_WRITE);
	CHECK(memcmp(memory, memory + 2048, 8) == 0);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dereg_mr(own));
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	OK(ibv_close_device(imported));
}

TEST(import_by_other_process)
{
	pid_t pid;
	struct link *link = child(importer, &pid);
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct handles handles = { .pd = p.pd[1]->handle, .mr = p.mr[1].mr->handle, .rkey = p.mr[1].mr->rkey,
				   .lkey = p.mr[1].mr->lkey };
	struct ibv_dm *dm = dev.max_dm_size ? make_dm(4096) : NULL;
	uint8_t data[64];

	if (dm) {
		fill(data, 64, 4);
		OK(ibv_memcpy_to_dm(dm, 0, data, 64));
		handles.dm = dm->handle;
	}
	put_fd(link, ctx->cmd_fd);
	put(link, &handles, sizeof(handles));
	get(link, &handles, sizeof(handles));
	fill(p.mr[0].p, 1000, 6);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 1000, .addr = handles.addr,
	     .rkey = handles.rkey);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	meet(link);
	join(pid);
	if (dm) {
		OK(ibv_memcpy_from_dm(data, dm, 0, 64));
		CHECK(filled(data, 64, 5));
	}
	/* What it imported is still there. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 1000, .to = &p.mr[1]);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 1000, 6));
}

TEST(import_bad_handles)
{
	struct ibv_context *imported = MAKE(ibv_import_device(dup(ctx->cmd_fd)));
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx)), *same = MAKE(ibv_import_pd(imported, pd->handle));
	uint8_t *memory = pages(4096);

	/* Whether the domain is there is found out at its import, or when it is used. */
	struct ibv_pd *none = ibv_import_pd(imported, 0x7777);
	if (none)
		CHECK(!ibv_reg_mr(none, memory, 4096, ALL));
	CHECK(!ibv_import_mr(same, 0x7777));
	CHECK(!ibv_import_device(-1));
	CHECK(!ibv_import_dm(imported, 0x7777));
}
