// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Unreliable connections. */
#include "verbs-test.h"

#include <arpa/inet.h>

TEST(uc_send)
{
	struct pair p = PAIR(.type = IBV_QPT_UC);

	fill(p.mr[0].p, 3000, 1);
	RECV(p.qp[1], 10, &p.mr[1], 0, 4096);
	RECV(p.qp[1], 11, &p.mr[1], 4096, 4096);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 3000);
	POST(p.qp[0], .opcode = IBV_WR_SEND_WITH_IMM, .id = 2, .from = &p.mr[0], .offset = 100, .length = 700,
	     .imm = htonl(0xcafe0001));
	expect_ok(p.cq[0], 1, SEND);
	expect_ok(p.cq[0], 2, SEND);
	struct ibv_wc wc = expect_ok(p.cq[1], 10, RECV);
	EQ(wc.byte_len, 3000);
	EQ(wc.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_GRH), 0);
	EQ(wc.qp_num, p.qp[1]->qp_num);
	wc = expect_ok(p.cq[1], 11, RECV);
	EQ(wc.byte_len, 700);
	EQ(wc.wc_flags & IBV_WC_WITH_IMM, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 0xcafe0001);
	CHECK(filled(p.mr[1].p, 3000, 1));
	CHECK(all_bytes(p.mr[1].p + 3000, 1096, 0));
	CHECK(memcmp(p.mr[1].p + 4096, p.mr[0].p + 100, 700) == 0);
}

TEST(uc_write)
{
	struct pair p = PAIR(.type = IBV_QPT_UC, .size = 1 << 20);

	fill(p.mr[0].p, 1 << 20, 2);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 1 << 20, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	/*
	 * The completion of a UC write says nothing of the other side; a SEND after it that has arrived
	 * does.
	 */
	RECV(p.qp[1], 10, NULL, 0, 0);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2);
	expect_ok(p.cq[0], 2, SEND);
	expect_ok(p.cq[1], 10, RECV);
	CHECK(filled(p.mr[1].p, 1 << 20, 2));
}

TEST(uc_write_with_imm)
{
	struct pair p = PAIR(.type = IBV_QPT_UC);

	fill(p.mr[0].p, 5000, 3);
	RECV(p.qp[1], 10, &p.mr[1], 8192, 16);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 1, .from = &p.mr[0], .length = 5000, .to = &p.mr[1],
	     .imm = htonl(77));
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	struct ibv_wc wc = expect_ok(p.cq[1], 10, RECV_RDMA_WITH_IMM);
	EQ(wc.byte_len, 5000);
	EQ(ntohl(wc.imm_data), 77);
	EQ(wc.wc_flags & IBV_WC_WITH_IMM, IBV_WC_WITH_IMM);
	CHECK(filled(p.mr[1].p, 5000, 3));
	CHECK(all_bytes(p.mr[1].p + 8192, 16, 0));
}

/* What finds no receive is lost, and neither side hears of it. */
TEST(uc_loss_without_receive)
{
	struct pair p = PAIR(.type = IBV_QPT_UC);

	fill(p.mr[0].p, 100, 4);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 100);
	expect_ok(p.cq[0], 1, SEND);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 2, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
	expect_none(p.cq[1]);
	no_event();
	EQ(state_of(p.qp[0]), IBV_QPS_RTS);
	EQ(state_of(p.qp[1]), IBV_QPS_RTS);
	/* The next message with a receive arrives in it. */
	RECV(p.qp[1], 10, &p.mr[1], 4096, 100);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 3, .from = &p.mr[0], .length = 100);
	expect_ok(p.cq[0], 3, SEND);
	expect_ok(p.cq[1], 10, RECV);
	CHECK(filled(p.mr[1].p + 4096, 100, 4));
	expect_none(p.cq[1]);
}

/* A remote access error on UC reaches nobody's completion queue, and nothing is written. */
TEST(uc_write_without_right)
{
	struct pair p = PAIR(.type = IBV_QPT_UC, .mr_access = LOCAL | IBV_ACCESS_REMOTE_READ);

	fill(p.mr[0].p, 100, 5);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 100, .to = &p.mr[1],
	     .to_offset = 1 << 20);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
	expect_none(p.cq[1]);
	CHECK(all_bytes(p.mr[1].p, 16384, 0));
	EQ(state_of(p.qp[0]), IBV_QPS_RTS);
}

/* UC has neither RDMA READ nor atomic operations. */
TEST(uc_refuses_read_and_atomics)
{
	struct pair p = PAIR(.type = IBV_QPT_UC);
	static const enum ibv_wr_opcode refused[] = { IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
						      IBV_WR_ATOMIC_FETCH_AND_ADD };

	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		struct op op = { .opcode = refused[i], .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[1] };
		int error = post(p.qp[0], &op);

		/* At once, or as a completion. */
		if (error) {
			EQ(error, EINVAL);
			continue;
		}
		expect_error(p.cq[0], i, LOC_QP_OP_ERR);
		/* UC has the state SQE for it. */
		wait_state(p.qp[0], IBV_QPS_SQE);
		set_state(p.qp[0], IBV_QPS_RTS);
	}
	RECV(p.qp[1], 10, &p.mr[1], 0, 100);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 99, .from = &p.mr[0], .length = 100);
	expect_ok(p.cq[0], 99, SEND);
	expect_ok(p.cq[1], 10, RECV);
}

/* A receive that is too short is an error of the receiver alone. */
TEST(uc_receive_too_short)
{
	struct pair p = PAIR(.type = IBV_QPT_UC);

	RECV(p.qp[1], 10, &p.mr[1], 0, 50);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 100);
	expect_ok(p.cq[0], 1, SEND);
	expect_error(p.cq[1], 10, LOC_LEN_ERR);
	EQ(state_of(p.qp[0]), IBV_QPS_RTS);
	wait_state(p.qp[1], IBV_QPS_ERR);
}

TEST(uc_many_in_order)
{
	struct pair p = PAIR(.type = IBV_QPT_UC, .send_wr = 64, .recv_wr = 256, .cqe = 512);
	unsigned int sent = 0;

	for (unsigned int i = 0; i < 200; i++)
		RECV(p.qp[1], i, &p.mr[1], i * 8, 8);
	for (unsigned int i = 0; i < 200; i++) {
		*(uint64_t *)(p.mr[0].p + i * 8) = 0x1000 + i;
		POST(p.qp[0], .opcode = IBV_WR_SEND, .id = i, .from = &p.mr[0], .offset = i * 8, .length = 8);
		if (i - sent >= 32)
			expect_ok(p.cq[0], sent++, SEND);
	}
	while (sent < 200)
		expect_ok(p.cq[0], sent++, SEND);
	for (unsigned int i = 0; i < 200; i++) {
		expect_ok(p.cq[1], i, RECV);
		EQ(((uint64_t *)p.mr[1].p)[i], 0x1000 + i);
	}
}
